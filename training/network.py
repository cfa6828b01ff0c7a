"""The runtime's modules run over whole batches: many pictures, and many examples beside each picture.

The weights are those of `Moondream`; only how tokens attend and how experts are summed is written anew, so that
everything has a fixed shape and a gradient. Tests hold both against the runtime.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, gelu, one_hot, scaled_dot_product_attention

from kestrel_runtime.models.moondream.adapters.slabs import BlockAdapters
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.text.decoder import MixtureOfExperts
from kestrel_runtime.models.moondream.vision.encoder import VisionModel
from training.batches import SHARED, Rows
from training.quantise import fake_quantised


class DenseExperts(MixtureOfExperts):
    """All experts on all tokens, then the weighted few: a fixed shape, at the cost of idle work."""

    quantised: bool = False
    balance: Tensor | None = None
    """How unevenly the last batch's tokens went to the experts: 1 is even."""

    def forward(
        self, hidden: Tensor, operation: Callable[..., Tensor] | None = None, adapters: BlockAdapters | None = None
    ) -> Tensor:
        """[T, dim] → [T, dim], by arithmetic of its own, which gradients pass."""
        assert operation is None, "training has one way"
        assert adapters is None, "training changes the weights themselves"
        up, down = self.fc1.weight, self.fc2.weight
        if self.quantised:
            up, down = fake_quantised(up), fake_quantised(down)
        experts, width, _ = up.shape
        logits = self.router(hidden).float()
        top = logits.topk(self.experts_per_token, dim=-1)
        chosen = one_hot(top.indices, experts).to(logits.dtype)  # [T, K, E]
        weights = (chosen * top.values.softmax(dim=-1)[..., None]).sum(dim=1)
        self.balance = (
            experts * (chosen.sum(dim=1).mean(dim=0) / self.experts_per_token * logits.softmax(-1).mean(0)).sum()
        )
        activated, gate = (hidden @ up.flatten(0, 1).T).unflatten(-1, (experts, width)).chunk(2, dim=-1)
        inner = gelu(activated) * (gate + 1) * weights.to(activated.dtype)[..., None]
        return inner.flatten(1) @ down.transpose(1, 2).flatten(0, 1)


class RowAttention:
    """How the tokens of a batch attend: a picture's to each other and to all before, an example's to its pictures
    and to its own before."""

    def __init__(self) -> None:
        self.num_prefix = 0
        self.mask: Tensor | None = None

    def prepare(self, rows: Rows, num_prefix: int) -> None:
        """Take the layout of the next batch."""
        self.num_prefix = num_prefix
        length = rows.ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=rows.ids.device).tril()
        is_patch = rows.patch >= 0
        visible = causal | (is_patch[:, :, None] & is_patch[:, None, :])
        own = (rows.example[:, :, None] == rows.example[:, None, :]) & visible
        own |= rows.sees_second[:, :, None] & (rows.example == SHARED)[:, None, :]
        prefix = rows.sees_image[:, :, None].expand(-1, -1, num_prefix)
        self.mask = torch.cat((prefix, own), dim=2)[:, None]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert self.mask is not None, "prepared first"
        batch = self.mask.shape[0]
        query, key, value = (
            part.unflatten(0, (batch, -1)).transpose(1, 2).to(torch.bfloat16 if part.is_cuda else part.dtype)
            for part in (query, key, value)
        )
        split = self.num_prefix
        picture = scaled_dot_product_attention(query[:, :, :split], key[:, :, :split], value[:, :, :split])
        examples = scaled_dot_product_attention(query[:, :, split:], key, value, attn_mask=self.mask)
        return torch.cat((picture, examples), dim=2).transpose(1, 2).flatten(0, 1)


@dataclass(slots=True)
class Prediction:
    """What the model says next: [rows, tokens, vocabulary], and bins where coordinates and sizes are due."""

    logits: Tensor
    coordinates: Tensor
    """[places, bins], in the order of `rows.coord_bin >= 0`."""
    sizes: Tensor
    balance: Tensor


class Network(nn.Module):
    """A `Moondream` over batches."""

    def __init__(self, model: Moondream) -> None:
        super().__init__()
        self.model = model
        self.attend = RowAttention()
        self.experts: list[DenseExperts] = []
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                module.__class__ = DenseExperts
                assert isinstance(module, DenseExperts)
                self.experts.append(module)

    def compile_blocks(self) -> None:
        """Have every block compiled on first use."""
        for block in (*self.model.vision.blocks, *self.model.text.blocks):
            block.compile()

    def quantise_experts(self) -> None:
        """From now on compute with experts as float8 would have them."""
        for experts in self.experts:
            experts.quantised = True

    def embed_images(self, crops: Tensor, grids: list[tuple[int, int]]) -> Tensor:
        """Crops of many pictures → [pictures, image tokens, dim]."""
        vision = self.model.vision
        features = vision.encode(crops)
        places: dict[tuple[int, int], list[int]] = {}
        starts, total = [], 0
        for index, grid in enumerate(grids):
            places.setdefault(grid, []).append(index)
            starts.append(total)
            total += 1 + grid[0] * grid[1]
        order, joined = [], []
        for (rows, columns), indices in places.items():
            count = 1 + rows * columns
            members = torch.tensor([starts[i] + c for i in indices for c in range(count)], device=crops.device)
            some = features[members].unflatten(0, (len(indices), count))
            pool = pooling(vision, rows, columns).to(some)
            joined.append(torch.cat((some[:, 0], pool @ some[:, 1:].flatten(1, 2)), dim=-1))
            order += indices
        projected = vision.proj_mlp(torch.cat(joined))
        return projected[torch.tensor(order, device=crops.device).argsort()]

    def forward(self, crops: Tensor, grids: list[tuple[int, int]], rows: Rows) -> Prediction:
        """Predicts from crops of pictures with their grids, and a row of examples of each."""
        return self.predict(self.embed_images(crops, grids), rows)

    def predict(self, images: Tensor, rows: Rows) -> Prediction:
        """Predicts from pictures that `embed_images` embedded, and a row of examples of each."""
        text, region, config = self.model.text, self.model.region, self.model.config
        ids = rows.ids.long()
        embedded = text.wte[ids]
        is_coordinate, is_size = ids == config.tokenizer.coord_id, ids == config.tokenizer.size_id
        with torch.autocast(ids.device.type, enabled=False):  # Fourier features need all their digits
            coordinates = region.encode_coordinates(rows.values[..., 0][is_coordinate])
            sizes = region.encode_sizes(rows.values[is_size])
        embedded = embedded.masked_scatter(is_coordinate[..., None], coordinates.to(embedded))
        embedded = embedded.masked_scatter(is_size[..., None], sizes.to(embedded))
        patches = self._second_pictures(images, rows)
        embedded = torch.where((rows.patch >= 0)[..., None], patches.to(embedded), embedded)
        start = text.wte[config.tokenizer.bos_id].expand(len(ids), 1, -1)
        hidden = torch.cat((start, images.to(embedded), embedded), dim=1)
        num_prefix = 1 + images.shape[1]
        prefix_positions = torch.arange(num_prefix, device=ids.device).expand(len(ids), -1)
        positions = torch.cat((prefix_positions, rows.position.long()), dim=1)
        self.attend.prepare(rows, num_prefix)
        hidden = text(hidden.flatten(0, 1), positions.flatten(), self.attend)
        hidden = hidden.unflatten(0, (len(ids), -1))[:, num_prefix:]
        balances = [experts.balance for experts in self.experts if experts.balance is not None]
        return Prediction(
            text.logits(hidden),
            region.coordinate_logits(hidden[rows.coord_bin >= 0]),
            region.size_logits(hidden[rows.size_bins[..., 0] >= 0]),
            torch.stack(balances).mean(),
        )

    @staticmethod
    def _second_pictures(images: Tensor, rows: Rows) -> Tensor:
        """Returns each row's second picture where its tokens are, [rows, tokens, dim]; arbitrary elsewhere."""
        own = torch.arange(len(images), device=images.device)
        return images[(own + rows.partner.long())[:, None], rows.patch.long().clamp(min=0)]


@functools.lru_cache(maxsize=64)
def pooling(vision: VisionModel, rows: int, columns: int) -> Tensor:
    """The runtime's stitching and pooling as one matrix [image tokens, tokens of all local crops]."""
    side = vision.config.grid_size
    count = rows * columns * side * side
    each = torch.eye(count).view(rows * columns, side, side, count)
    stitched = vision._stitch(each, rows, columns).permute(2, 0, 1)
    return adaptive_avg_pool2d(stitched, (side, side)).flatten(1).T.contiguous().to(vision.pos_emb.device)
