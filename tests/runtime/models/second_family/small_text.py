"""A second model family, as a package outside of the engine would bring it: text only, one attention layer.

The engine does not know it: an entry point names `FAMILY`, and a checkpoint's `model_type` names the family.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from kestrel_ops import Kernels
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import MemoryPlan, SkillDefaults
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.api.events import FinishReason, Output, QueryOutput, TextChannel, TextDelta
from kestrel_runtime.api.requests import Query
from kestrel_runtime.execution.buckets import DecodeSize, PrefillSize
from kestrel_runtime.execution.executor import DeviceMemory
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.request_state import RowNeeds
from kestrel_runtime.execution.sampling import TokenSampler
from kestrel_runtime.execution.step_inputs import DecodeInputs, PackedChunks, PrefillInputs
from kestrel_runtime.execution.step_runner import StateShape, StepRunner
from kestrel_runtime.imaging.crops import Crops
from kestrel_runtime.loading.checkpoint import Checkpoint
from kestrel_runtime.memory.plan import MemoryNeeds, MemoryReading, plan_memory
from kestrel_runtime.models.family import LoadedWeights, Prompt, Verification
from kestrel_runtime.output.output_parser import Grammar, GrammarState, OutputParser, Token, TokenRule
from kestrel_runtime.output.text_decoder import TextDecoder
from kestrel_runtime.scheduling.batch import EncodeItem
from kestrel_runtime.scheduling.limits import StepBounds
from kestrel_runtime.scheduling.sequence import TokenSequence

KERNELS = Kernels.select("cpu", {})


@dataclass(frozen=True)
class SmallTextConfig:
    vocab_size: int
    dim: int
    n_kv_heads: int
    max_context: int
    architecture: str = "small-text"
    n_layers: int = 1
    bos_id: int = 0
    positions_per_image: int = 0

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_kv_heads


class SmallText:
    """Embedding, one attention layer over learnt positions, and a head."""

    def __init__(self, config: SmallTextConfig, weights: Mapping[str, Tensor]) -> None:
        self.config, self.weights = config, weights
        self.dtype, self.device = weights["embedding"].dtype, weights["embedding"].device

    def hidden(self, ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        return self.attended(self.weights["embedding"][ids], positions, attend)

    def attended(self, embeddings: Tensor, positions: Tensor, attend: Any) -> Tensor:
        rows = embeddings + self.weights["position"][positions]
        packed = rows @ self.weights["qkv"].T
        query, key, value = packed.unflatten(-1, (3, self.config.n_kv_heads, -1)).unbind(1)
        return rows + attend(0, query, key, value).flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.weights["head"].T).float()


class SmallTextExecutor:
    def __init__(self, model: SmallText, memory: DeviceMemory) -> None:
        self._model, self._memory = model, memory

    def encode(self, items: Sequence[EncodeItem]) -> None:
        raise AssertionError("requests with images are refused")

    def prefill_hidden(self, inputs: PrefillInputs) -> Tensor:
        fields, cache = inputs.device, self._memory.cache
        attend = cache.prefill(PackedChunks.of(inputs, self._memory.state))
        return self._model.hidden(fields.token_ids, fields.positions, attend)[fields.sample_tokens]

    def padded_decode(self, size: DecodeSize, needs: RowNeeds) -> DecodeSize:
        return size

    def padded_prefill(self, size: PrefillSize, value_kinds: int, *, uses_adapters: bool) -> PrefillSize:
        return size

    def forward(self, inputs: PrefillInputs | DecodeInputs) -> Tensor:
        return self.prefill_hidden(inputs) if isinstance(inputs, PrefillInputs) else self.decode_hidden(inputs)

    def decode_hidden(self, inputs: DecodeInputs) -> Tensor:
        (rows, positions, pages), state, cache = inputs.device, self._memory.state, self._memory.cache
        state.add_pages(rows, positions, pages, cache.page_size)
        attend = cache.decode(positions, state.page_table[rows, : inputs.size.max_pages])
        return self._model.hidden(state.read(rows).token_ids, positions, attend)

    def sample(self, hidden: Tensor, inputs: PrefillInputs | DecodeInputs) -> Tensor:
        state, rules = self._memory.state, self._memory.rules
        sampler = TokenSampler(state, rules, inputs.sample_rows, inputs.needs, KERNELS)
        ids = sampler.ids(self._model.logits(hidden))
        return sampler.write(ids, torch.zeros_like(ids), torch.zeros(len(ids), 1))

    def release(self, sequence: TokenSequence) -> None: ...
    def forget_images(self) -> None: ...
    def capture(self) -> None: ...
    def capture_wanted(self) -> bool:
        return False

    def reset(self) -> None: ...


class SmallTextParser(OutputParser):
    grammar = Grammar((GrammarState(TokenRule(), 0),))

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._decoder, self.max_tokens, self._text = TextDecoder(tokenizer.token_bytes), max_tokens, ""

    def parse(self, token: Token) -> list[TextDelta]:
        text = self._decoder.push(token.id)
        if self.num_consumed == self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
            text += self._decoder.flush()
        self._text += text
        return [TextDelta(text, TextChannel.ANSWER, self.num_consumed - 1, 1)] if text else []

    def output(self) -> Output:
        return QueryOutput(self._text, None)


class SmallTextQuery:
    name, text_field, defaults = "query", "question", SkillDefaults(temperature=0.0, top_p=1.0)

    def prompt(self, request: Query, tokenizer: Any, config: Any) -> Prompt:
        if request.image is not None:
            raise InvalidRequest((Violation("image", "this model reads text alone"),))
        return Prompt([Token(id) for id in tokenizer.encode(request.question)])

    def message_tokens(self, request: Any, tokenizer: Any, config: Any) -> list[int]:
        raise AssertionError("the family has no conversations")

    def new_parser(self, request: Query, tokenizer: Any, config: Any) -> OutputParser:
        return SmallTextParser(tokenizer, request.sampling.max_tokens or 20)


class NoCropping:
    crop_bytes, max_crops = 0, 0

    def select(self, height_px: int, width_px: int) -> tuple[int, int]:
        return 0, 0

    def make_crops(self, image: Image.Image) -> Crops:
        raise AssertionError("requests with images are refused")


@dataclass(frozen=True)
class PreparedSmallText:
    model: SmallText
    config: EngineConfig
    bounds: StepBounds
    most_pages: ClassVar[int] = 64

    def crop_on_device(self) -> None:
        return None

    def plan_cache(self, host_image_bytes: int) -> tuple[int, MemoryPlan]:
        page_bytes = KVCache.bytes_per_page(self.model.config, self.config.page_size, self.model.dtype)
        needs = MemoryNeeds(page_bytes, 1, self.most_pages, activation_bytes=2**20, graph_bytes=0, image_bytes=0)
        reading = MemoryReading.of(self.model.device, sum(item.nbytes for item in self.model.weights.values()))
        return plan_memory(reading, needs, self.config.memory_utilization, self.config.num_kv_pages)

    def adapter_target(self) -> None:
        return None

    def new_step_runner(
        self, num_pages: int, graph_bytes: int, image_cache_bytes: int = 0, crop_cache_bytes: int = 0
    ) -> StepRunner:
        model, own = self.model, self.model.config
        cache = KVCache(own, num_pages, self.config.page_size, model.device, model.dtype)
        shape = StateShape(own.vocab_size, own.max_context, 1, 0, own.dim, model.dtype, lambda _: 0)
        return StepRunner(lambda memory: SmallTextExecutor(model, memory), cache, shape, self.bounds)


class SmallTextFamily:
    def check_config(self, checkpoint: Checkpoint) -> None:
        pass

    def load(
        self, checkpoint: Checkpoint, config: EngineConfig, device: Any, dtype: Any, meanwhile: object = None
    ) -> LoadedWeights:
        fields = {name: value for name, value in (checkpoint.config or {}).items() if name != "model_type"}
        weights = {name: tensor.to(device, dtype) for name, tensor in load_file(checkpoint.weight_files[0]).items()}
        model = SmallText(SmallTextConfig(**fields), weights)
        return LoadedWeights(model, sum(tensor.numel() for tensor in weights.values()))

    def skills(self, config: Any) -> Mapping[str, SmallTextQuery]:
        return {"query": SmallTextQuery()}

    def cropping(self, config: Any) -> NoCropping:
        return NoCropping()

    def prepare(self, model: Any, config: EngineConfig, bounds: Any, *, owns_model: bool) -> PreparedSmallText:
        return PreparedSmallText(model, config, bounds)

    def verification(self, model: SmallText, config: EngineConfig) -> Verification:
        return Verification(model.dtype == torch.float32, lambda fixture, prepare: iter(()))


FAMILY = SmallTextFamily()
