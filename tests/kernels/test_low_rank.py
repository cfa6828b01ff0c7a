"""Terms of adapters: every implementation against the definition, on odd sizes and all mixtures of slots."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from kestrel_ops import BlockLowRank, LowRank, reference
from kestrel_ops.dispatch import module_of
from tests.kernels.implementations import DEVICE, implementations, relative_error

EPSILON = 1e-5
IS_GPU = DEVICE == "cuda"  # where the interpreter runs kernels, few small cases take long enough


class Draw:
    """Random tensors of one seed, on the device."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self._chance = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def rows(self, *shape: int, dtype: torch.dtype | None = None, size: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self._chance) * size
        return values.to(DEVICE, dtype or self.dtype)

    def layer(self, ranks: list[int], ins: int, outs: int, kind: int = 0) -> LowRank:
        """One adapter for each of the ranks."""
        most = max(ranks)
        weights = LowRank(
            self.rows(len(ranks), most, ins, size=ins**-0.5),
            self.rows(len(ranks), most, outs, size=most**-0.5),
            kind,
        )
        for slot, rank in enumerate(ranks):
            weights.a[slot, rank:] = 0
            weights.b[slot, rank:] = 0
        return weights

    def slots(self, count: int, num_slots: int) -> Tensor:
        return torch.randint(0, num_slots + 1, (count,), generator=self._chance).to(DEVICE)

    def block(
        self, slots: Tensor, ranks: list[int], dim: int, qkv: int, inner: int, of: str, *, is_decode: bool
    ) -> BlockLowRank:
        """A block whose attention has rows of `dim`; without an MLP where `inner` is 0."""
        others = [*ranks[1:], ranks[0]]
        up, down = [self.layer(ranks, dim, qkv, 0)], [self.layer(others, dim, dim, 1)]
        if inner:
            up.append(self.layer(others, dim, inner, 2))
            down.append(self.layer(ranks, inner, dim, 3))
        package = reference if of == "reference" else import_module("kestrel_ops.lora.triton_rows_by_slot")
        kinds = torch.tensor([ranks, others, others, ranks], dtype=torch.int32, device=DEVICE)
        grouped = package.rows_by_slot(slots, kinds, max(ranks), is_decode=is_decode, dtype=self.dtype)
        flags = torch.zeros(len(ranks) + 1, dtype=torch.bool, device=DEVICE)
        flags[len(ranks)] = True
        weight, bias = 1 + self.rows(dim, size=0.1), self.rows(dim, size=0.1)
        normed = torch.full((len(slots), dim), torch.nan, dtype=self.dtype, device=DEVICE)
        return BlockLowRank(tuple(up), tuple(down), weight, bias, flags, normed, grouped)


def each_kind_of_slots(count: int, num_slots: int) -> dict[str, Tensor]:
    every = (torch.arange(count) + 1) % (num_slots + 1)
    return {
        "none": torch.zeros(count, dtype=torch.int64, device=DEVICE),
        "one": torch.full((count,), num_slots, device=DEVICE),
        "mixed": every.to(DEVICE),
        "prompts": every.sort().values.flip(0).to(DEVICE),
    }


@pytest.mark.parametrize(
    ("count", "num_slots", "kind"),
    [(1, 1, "one"), (40, 3, "none"), (64, 8, "mixed"), (1500, 3, "prompts"), (60, 9, "mixed")],
)
def test_rows_and_ranks_are_listed_by_slot(count: int, num_slots: int, kind: str):
    rows_by_slot = import_module("kestrel_ops.lora.triton_rows_by_slot").rows_by_slot
    slots = each_kind_of_slots(count, num_slots)[kind]
    ranks = torch.arange(4 * num_slots, dtype=torch.int32, device=DEVICE).view(4, num_slots) % 20
    groups = rows_by_slot(slots, ranks, 19, is_decode=True, dtype=torch.float32, block_rows=16).groups
    used = sorted(set(slots.tolist()) - {0})
    *sizes, num_items = groups.counts.tolist()[:5]
    starts: dict[int, list[int]] = {slot: [] for slot in used}
    for layer in range(4):
        expected: list[int] = []
        for slot in used:
            rank = int(ranks[layer, slot - 1])
            starts[slot].append(len(expected))
            expected += [*range(19 * (slot - 1), 19 * (slot - 1) + rank), *[0] * (-rank % 16)]
        assert groups.places[layer].tolist() == expected + [0] * (groups.places.shape[1] - len(expected))
        assert sizes[layer] == len(expected)
    assert num_items <= groups.num_items
    rows: dict[int, list[int]] = {slot: [] for slot in used}
    for slot, first, number, *others in groups.items[:num_items].tolist():
        assert 0 < number <= 16
        assert len(rows[slot]) % 16 == 0, "items are filled"
        rows[slot] += groups.order[first : first + number].tolist()
        assert others == [*ranks[:, slot - 1].tolist(), *starts[slot]]
    assert rows == {slot: (slots == slot).nonzero()[:, 0].tolist() for slot in used}


@pytest.mark.parametrize("add_low_rank", implementations("add_low_rank"))
@pytest.mark.parametrize(
    ("count", "ranks", "ins", "outs", "kind"),
    [
        (1, [1], 17, 7, "one"),
        (5, [3, 24, 1], 40, 33, "mixed"),
        (20, [32, 5, 0], 77, 260, "prompts"),
        (3, [40, 16], 1100, 40, "mixed"),
        (2, [512], 20, 24, "one"),
        (5, [3, 24, 1], 40, 33, "none"),
        *([(3000, [32, 512, 3], 2048, 301, kind) for kind in ("mixed", "prompts", "one")] if IS_GPU else []),
    ],
)
def test_each_row_gets_the_terms_of_its_slot(
    add_low_rank: Any, count: int, ranks: list[int], ins: int, outs: int, kind: str
):
    draw = Draw(1)
    slots = each_kind_of_slots(count, len(ranks))[kind]
    weights, rows, out = draw.layer(ranks, ins, outs), draw.rows(count, ins), draw.rows(count, outs)
    found = out.clone()
    add_low_rank(found, rows, weights, slots)
    for row, slot in enumerate(slots.tolist()):
        term = rows[row] @ weights.a[slot - 1].T @ weights.b[slot - 1] if slot else torch.zeros(outs, device=DEVICE)
        torch.testing.assert_close(found[row], out[row] + term, atol=2e-5, rtol=2e-5)
    assert torch.equal(found[slots == 0], out[slots == 0])


PROMPTS = [
    (torch.float32, 1, [3], 48, 24, 40, "mixed"),
    (torch.bfloat16, 9, [4, 1, 9], 48, 56, 0, "none"),
    (torch.bfloat16, 9, [4, 1, 9], 48, 56, 0, "mixed"),
    (torch.float32, 21, [24, 32, 0, 17], 48, 40, 264, "prompts"),
    *(
        (dtype, 3000, [32, 1, 0, 33], 256, 768, 1032, "prompts")
        for dtype in (torch.bfloat16, torch.float32)
        if IS_GPU
    ),
    *((torch.bfloat16, count, [512, 32], 2048, 768, 8192, "mixed") for count in (70, 600, 2100) if IS_GPU),
]


@pytest.mark.parametrize(("dtype", "count", "ranks", "dim", "qkv", "inner", "kind"), PROMPTS)
def test_blocks_of_prompts_get_what_the_definition_adds(
    dtype: torch.dtype, count: int, ranks: list[int], dim: int, qkv: int, inner: int, kind: str
):
    slots = each_kind_of_slots(count, len(ranks))[kind]
    results: list[list[Tensor]] = []
    for of in ("reference", "triton"):
        draw = Draw(2, dtype)
        low_rank = draw.block(slots, ranks, dim, qkv, inner, of, is_decode=False)
        modules = [reference] * 3
        if of == "triton":
            names = ("add_layer_norm", "add_up_terms", "add_down_terms")
            modules = [module_of("triton", name) for name in names]
        product, out = draw.rows(count, qkv + inner), draw.rows(count, dim)
        activations, scale = draw.rows(count, dim + inner), None
        if kind == "prompts":
            activations, scale = reference.quantise_rows(activations)
        hidden = draw.rows(count, dim, dtype=torch.float32)
        before = product.clone(), out.clone()
        modules[0].add_layer_norm(hidden, None, EPSILON, dtype, None, low_rank)
        modules[1].add_up_terms(product, low_rank)
        modules[2].add_down_terms(out, activations, scale, low_rank)
        for found, old in zip((product, out), before, strict=True):
            assert torch.equal(found[slots == 0], old[slots == 0])
        results.append([(found - old).float() for found, old in zip((product, out), before, strict=True)])
    for expected, found in zip(*results, strict=True):
        if kind != "none":
            assert relative_error(found, expected) < (1e-4 if dtype == torch.float32 else 0.03)


STEPS = [
    (torch.float32, 1, [2], 48, 24, 40, "mixed"),
    (torch.bfloat16, 5, [3, 24, 1], 40, 72, 24, "mixed"),
    (torch.float8_e4m3fn, 20, [16, 33, 8], 64, 96, 32, "mixed"),
    (torch.bfloat16, 3, [4, 9], 48, 56, 0, "none"),
    *(
        (weight, 64, [32] * 8, 2048, 6144, 8192, "mixed")
        for weight in (torch.bfloat16, torch.float8_e4m3fn)
        if IS_GPU
    ),
    *((torch.bfloat16, count, [512, 24, 1], 256, 768, 1024, "mixed") for count in (1, 2, 16, 17, 130) if IS_GPU),
]


@pytest.mark.parametrize(("weight", "count", "ranks", "dim", "qkv", "inner", "kind"), STEPS)
def test_steps_with_adapters_are_those_without_and_the_terms(
    weight: torch.dtype, count: int, ranks: list[int], dim: int, qkv: int, inner: int, kind: str
):
    slots = each_kind_of_slots(count, len(ranks))[kind]
    dtype = torch.float16 if weight == torch.float8_e4m3fn else weight
    results: dict[str, list[Tensor]] = {}
    for of in ("reference", "triton", "triton without"):
        draw = Draw(3, torch.float32 if weight == torch.float32 else torch.bfloat16)
        expand, contract = reference.decode_expand, reference.decode_contract
        if of != "reference":
            expand = import_module("kestrel_ops.linear.triton_decode_expand").decode_expand
            contract = import_module("kestrel_ops.linear.triton_decode_contract").decode_contract
        low_rank = draw.block(slots, ranks, dim, qkv, inner, of.split()[0], is_decode=True)
        given: dict[str, Any] = {} if of.endswith("without") else {"low_rank": low_rank}
        up = draw.rows(qkv + inner, dim, dtype=weight, size=dim**-0.5)
        down = draw.rows(dim, dim + inner, dtype=weight, size=dim**-0.5)
        scales = [None, None]
        if weight == torch.float8_e4m3fn:
            scales = [draw.rows(len(each), dtype=torch.float32, size=0.3).abs() for each in (up, down)]
        hidden, bias = draw.rows(count, dim, dtype=torch.float32), draw.rows(qkv + inner, dtype=torch.float32)
        plain, activations = draw.rows(count, qkv, dtype=dtype), draw.rows(count, dim + inner, dtype=dtype)
        sums = up.float().sum(dim=1) if scales[0] is None else up.float().sum(dim=1) * scales[0]
        expand(hidden, up, scales[0], sums, bias, EPSILON, qkv, plain, activations[:, dim:], None, **given)
        contract(activations, down, scales[1], bias[:dim], hidden, **given)
        results[of] = [plain.float(), activations.float(), hidden]
    tolerance = 2e-4 if weight == torch.float32 else 0.02
    for found, expected, without in zip(
        *(results[of] for of in ("triton", "reference", "triton without")), strict=True
    ):
        assert relative_error(found, expected) < tolerance
        if count > 1:  # for one token without adapters there is another kernel
            assert torch.equal(found[slots == 0], without[slots == 0])
