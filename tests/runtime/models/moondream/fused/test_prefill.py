from typing import Literal

import pytest
import torch
from msgspec.structs import replace

from kestrel_ops import Kernels
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.models.moondream.fused.prefill import FusedPrefill
from kestrel_runtime.models.moondream.fused.weights import fused_blocks
from kestrel_runtime.scheduling.batch import Chunk
from kestrel_runtime.scheduling.sequence import SequenceImage
from tests.runtime.dense_attend import DenseAttend
from tests.runtime.execution.packed_chunks import packed_chunks
from tests.runtime.models.moondream.tiny import random_model, tiny_config
from tests.runtime.sequences import new_sequence

CPU = torch.device("cpu")
PREFIX = 17  # BOS and the 4 × 4 patches of the tiny model
LATER = ((3, 9), (11, 17))
VARIANTS = [(2, 2, 2), (2, 4, 2), (3, 2, 2)]  # generation, query heads, key/value heads

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


class Prompts:
    """Sequences of some lengths on a tiny decoder both ways, plain and fused.

    Some begin with an image, and `conversations` have images later on.
    """

    def __init__(
        self,
        lengths,
        variant=VARIANTS[0],
        *,
        precision: Literal["model", "float8"] = "model",
        cache_dtype=torch.float32,
        pictured=(),
        conversations=(),
        ff_dim=32,
        scaled_linear="reference",
    ):
        generation, n_heads, n_kv_heads = variant
        config = tiny_config(generation, n_heads=n_heads, n_kv_heads=n_kv_heads, ff_dim=ff_dim)
        self.text = random_model(config).text
        kernels = Kernels.select("cpu", {"scaled_linear": scaled_linear})
        self.fused = FusedPrefill(self.text, fused_blocks(self.text, precision), kernels)
        self.cache = KVCache(self.text.config, 64, 4, CPU, cache_dtype)
        free = torch.randperm(64).tolist()
        self.sequences, self.embeddings = [], []
        for row, length in enumerate(lengths):
            places = ((1, PREFIX - 1),) if row in pictured else LATER if row in conversations else ()
            images = [SequenceImage(start, end - start) for start, end in places]
            sequence = new_sequence(length - sum(image.num_positions for image in images))
            sequence = replace(sequence, images=images)
            sequence.cache.pages = [free.pop() for _ in range(-(-length // 4))]
            self.sequences.append(sequence)
            self.embeddings.append(torch.randn(length, self.text.config.dim))

    def plain(self, row):
        """Final hidden states, and the keys of each layer, of one sequence by itself."""
        embeddings, attend = self.embeddings[row], DenseAttend(spans=self.sequences[row].spans)
        return self.text(embeddings, torch.arange(len(embeddings)), attend), attend

    def run(self, *ranges, last=None):
        """Prefill the given (row, start, end); with `last`, ask for the last rows of those of the chunks."""
        chunks = [Chunk(self.sequences[row], start, end) for row, start, end in ranges]
        plan = packed_chunks(chunks, self.cache.page_size, CPU)
        embeddings = torch.cat([self.embeddings[row][start:end] for row, start, end in ranges])
        rows = None if last is None else (plan.query_starts[1:].long() - 1)[torch.tensor(last, dtype=torch.int64)]
        return self.fused.forward(embeddings, plan, self.cache, rows)

    def cached_keys(self, layer, row):
        pages = self.cache.key_pages[layer, self.sequences[row].cache.pages]
        return pages.transpose(1, 2).flatten(0, 1)[: len(self.embeddings[row])]


def off_by(result, wanted):
    return ((result - wanted).norm() / wanted.norm()).item()


@every_variant
def test_packed_prompts_give_what_the_plain_model_gives_one_by_one(variant):
    prompts = Prompts((5, 23, 1, 30), variant, pictured=(1, 3))
    hidden = prompts.run((0, 0, 5), (1, 0, 23), (2, 0, 1), (3, 0, 30))
    assert hidden.dtype == torch.float32
    wanted = torch.cat([prompts.plain(row)[0] for row in range(4)])
    assert off_by(hidden, wanted) < 1e-5


@every_variant
def test_the_cache_holds_the_keys_of_every_layer(variant):
    prompts = Prompts((5, 23), variant, pictured=(1,))
    prompts.run((0, 0, 5), (1, 0, 23), last=[1])
    for row in range(2):
        _, attend = prompts.plain(row)
        for layer, keys in attend.keys.items():
            assert off_by(prompts.cached_keys(layer, row), keys) < 1e-5


@every_variant
@pytest.mark.parametrize("last", [[0], [2], [0, 1, 2], [2, 0]], ids=str)
def test_last_rows_are_those_of_the_whole(variant, last):
    prompts = Prompts((5, 23, 17), variant, pictured=(1, 2))
    hidden = prompts.run((0, 0, 5), (1, 0, 23), (2, 0, 17), last=last)
    wanted = torch.stack([prompts.plain(row)[0][-1] for row in last])
    assert off_by(hidden, wanted) < 1e-5


@every_variant
def test_conversations_with_several_images_give_the_same_at_once_and_span_by_span(variant):
    prompts = Prompts((23, 30), variant, conversations=(0, 1))
    wanted = torch.stack([prompts.plain(row)[0][-1] for row in range(2)])
    assert off_by(prompts.run((0, 0, 23), (1, 0, 30), last=[0, 1]), wanted) < 1e-5
    prompts.cache.renew()
    prompts.run((0, 0, 3), (1, 0, 9), last=[])
    prompts.run((1, 9, 17), (0, 3, 9), last=[])
    assert off_by(prompts.run((1, 17, 30), (0, 9, 23), last=[1, 0]), wanted) < 1e-5


def test_where_no_prompt_ends_no_row_comes_back_but_the_cache_is_filled():
    prompts = Prompts((23,), pictured=(0,))
    hidden = prompts.run((0, 0, 20), last=[])
    assert hidden.shape == (0, prompts.text.config.dim)
    _, attend = prompts.plain(0)
    assert off_by(prompts.cached_keys(2, 0)[:20], attend.keys[2][:20]) < 1e-5
    assert off_by(prompts.run((0, 20, 23), last=[0]), prompts.plain(0)[0][-1:]) < 1e-5


@every_variant
def test_a_prompt_in_chunks_is_the_prompt_as_a_whole(variant):
    prompts = Prompts((30, 9), variant, pictured=(0,))
    parts = [prompts.run((0, 0, 19)), prompts.run((0, 19, 24), (1, 0, 3)), prompts.run((1, 3, 9), (0, 24, 30))]
    first = torch.cat((parts[0], parts[1][:5], parts[2][6:]))
    second = torch.cat((parts[1][5:], parts[2][:6]))
    assert off_by(first, prompts.plain(0)[0]) < 1e-5
    assert off_by(second, prompts.plain(1)[0]) < 1e-5


@every_variant
@pytest.mark.parametrize(
    ("precision", "cache_dtype"), [("float8", torch.float32), ("model", torch.float8_e4m3fn)], ids=str
)
@pytest.mark.parametrize("last", [None, [0, 1]])
def test_float8_stays_within_a_few_percent(variant, precision, cache_dtype, last):
    prompts = Prompts((24, 30), variant, precision=precision, cache_dtype=cache_dtype, pictured=(1,))
    prompts.run((0, 0, 8), (1, 0, 20))
    hidden = prompts.run((0, 8, 24), (1, 20, 30), last=last)
    wanted = [prompts.plain(0)[0][8:], prompts.plain(1)[0][20:]]
    if last is not None:
        wanted = [rows[-1:] for rows in wanted]
    assert 1e-4 < off_by(hidden, torch.cat(wanted)) < 0.1


@pytest.mark.parametrize("ff_dim", [24, 20])
def test_in_float8_any_sizes_are_multiplied_by_the_library(ff_dim):
    prompts = Prompts((5, 23), precision="float8", ff_dim=ff_dim, scaled_linear="library")
    hidden = prompts.run((0, 0, 5), (1, 0, 23), last=[0, 1])
    wanted = torch.stack([prompts.plain(row)[0][-1] for row in range(2)])
    assert off_by(hidden, wanted) < 0.1


@every_variant
def test_a_short_type_is_rounded_less_than_by_the_plain_model(variant):
    prompts = Prompts((24, 30), variant, pictured=(1,))
    prompts.embeddings = [rows.bfloat16().float() for rows in prompts.embeddings]
    prompts.text.load_state_dict({name: value.bfloat16() for name, value in prompts.text.state_dict().items()})
    wanted = torch.cat([prompts.plain(row)[0] for row in range(2)])
    prompts.text.bfloat16()
    prompts.embeddings = [rows.bfloat16() for rows in prompts.embeddings]
    plain = torch.cat([prompts.plain(row)[0] for row in range(2)])
    prompts.fused = FusedPrefill(prompts.text, fused_blocks(prompts.text, "model"), Kernels.select("cpu", {}))
    prompts.cache = KVCache(prompts.text.config, 64, 4, CPU, torch.bfloat16)
    assert off_by(prompts.run((0, 0, 24), (1, 0, 30)), wanted) < off_by(plain, wanted) < 0.05


def test_embeddings_are_left_as_they_are():
    prompts = Prompts((5,))
    before = prompts.embeddings[0].clone()
    prompts.run((0, 0, 5))
    assert torch.equal(prompts.embeddings[0], before)
