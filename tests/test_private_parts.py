"""Tries private parts of libraries, and compares those that the code uses with the table of CONTRIBUTING.md."""

import re

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from tests.reference_fixtures import CHECKOUT
from tools import structure

_TABLE = re.search(
    r"^\| Part \|.*?\n\|[-|]+\n(.*?)\n\n", (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M | re.S
)
assert _TABLE is not None
ROWS = [[cell.strip() for cell in row.strip("|").split("|")] for row in _TABLE[1].splitlines()]
"""The part, why it is used, the bound and the test."""
NOT_COUNTED = {"_fork_exec", "driver"}
"""Parts that `tools.structure` does not find: of the standard library, and modules that are imported by name."""


def test_the_table_lists_the_private_parts_that_the_code_uses():
    listed = {name.rpartition(".")[2] for row in ROWS for name in re.findall(r"`([\w.]+)`", row[0])}
    used = {place.rpartition(": ")[2].rpartition(".")[2] for place in structure.private_parts()}
    assert listed - NOT_COUNTED == used - {"_sys_modules_len"}  # which only the test below reads


def test_each_row_names_a_bound_of_pyproject_and_a_test():
    bounds = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    for part, _, bound, test in ROWS:
        found = re.search(r"^`([\w-]+)((?:==|<)[\d.]+)`", bound)
        assert found is not None, part
        assert re.search(rf'{found[1]}(?: = ")?[^"]*{re.escape(found[2])}\b', bounds), part
        path, name = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", test)[0]
        assert f"def {name}(" in (CHECKOUT / path).read_text(encoding="utf-8"), part


def test_hypothesis_draws_no_numbers_and_words_from_our_modules():
    @given(st.integers())
    def draw(number: int) -> None:
        assert isinstance(number, int)

    draw()
    # Its own function sets this once it has read the modules.
    assert providers._sys_modules_len is None


def test_the_products_of_torch_take_what_the_kernels_pass():
    """Tensors without values have shapes and types alone, so that no GPU is needed."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bfloat16, float8, ends = torch.bfloat16, torch.float8_e4m3fn, empty(3, dtype=torch.int32)
    rows, stack = empty(6, 32, dtype=bfloat16), empty(3, 48, 32, dtype=bfloat16).transpose(1, 2)
    assert torch.ops.aten._grouped_mm(rows, stack, offs=ends).shape == (6, 48)
    rows, stack = empty(6, 32, dtype=float8), empty(3, 48, 32, dtype=float8).transpose(1, 2)
    product = torch.ops.aten._scaled_grouped_mm(
        rows, stack, empty(6), empty(3, 48), offs=ends, out_dtype=bfloat16, use_fast_accum=True
    )
    assert (product.shape, product.dtype) == ((6, 48), bfloat16)
    product = torch._scaled_mm(
        rows,
        empty(48, 32, dtype=float8).t(),
        scale_a=empty(6, 1),
        scale_b=empty(1, 48),
        bias=empty(48, dtype=bfloat16),
        out_dtype=bfloat16,
        use_fast_accum=True,
    )
    assert (product.shape, product.dtype) == ((6, 48), bfloat16)


def test_torch_has_a_kernel_that_takes_a_known_time():
    assert callable(torch.cuda._sleep)
