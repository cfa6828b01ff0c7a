import pytest
import torch

from kestrel_ops.attention.cuda_crop_attention import product_source
from tests.kernels.implementations import (
    DEVICE,
    FLOAT8,
    ROUNDING,
    implementation_name,
    implementations,
    relative_error,
)

# Crops, patches, heads and their width. Without a GPU the library attends, and Triton's interpreter only rounds.
SIZES = [(1, 97, 3, 16), (2, 200, 2, 72), (3, 192, 1, 24)] if DEVICE == "cuda" else [(1, 97, 3, 16), (2, 40, 2, 72)]

every_implementation = pytest.mark.parametrize(
    "crop_attention", implementations("crop_attention"), ids=implementation_name
)


def some_packed(crops, patches, heads, head_dim, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(crops * patches, 3 * heads * head_dim).to(DEVICE, dtype)


def written_out(packed, patches, heads):
    dim = packed.shape[1] // 3
    width = dim // heads
    out = torch.empty(len(packed), dim, dtype=torch.float64, device=packed.device)
    for first in range(0, len(packed), patches):
        rows = slice(first, first + patches)
        for head in range(heads):
            query, key, value = (packed[rows, part * dim + head * width :][:, :width].double() for part in range(3))
            weights = (query @ key.T / width**0.5).softmax(dim=1)
            out[rows, head * width : (head + 1) * width] = weights @ value
    return out


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("patches", "head_dim"), [(9, 72), (16, 16), (49, 24), (33, 64), (20, 4)])
def test_patches_attend_within_their_crop_and_head(crop_attention, patches, head_dim, dtype):
    packed = some_packed(2, patches, 3, head_dim, dtype)
    out = crop_attention(packed, patches, 3)
    assert out.dtype == dtype
    assert out.shape == (2 * patches, 3 * head_dim)
    # Weights are rounded to the type as well.
    assert relative_error(out, written_out(packed, patches, 3)) < 2 * ROUNDING[dtype]


@every_implementation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("crops", "patches", "heads", "head_dim"), SIZES)
def test_crops_of_several_key_blocks_are_attended_whole(crop_attention, crops, patches, heads, head_dim, dtype):
    packed = some_packed(crops, patches, heads, head_dim, dtype)
    wanted = written_out(packed, patches, heads)
    assert relative_error(crop_attention(packed, patches, heads), wanted) < 2 * ROUNDING[dtype]
    rounded = crop_attention(packed, patches, heads, 1 / 448)
    assert relative_error(rounded.double() / 448, wanted.clamp(-1, 1)) < ROUNDING[FLOAT8]


@every_implementation
@pytest.mark.skipif(DEVICE == "cpu", reason="full size takes a CUDA device")
@pytest.mark.parametrize("crops", [1, 9, 40])
def test_full_size_crops_give_the_same_every_time(crop_attention, crops):
    packed = some_packed(crops, 729, 16, 72, torch.bfloat16)
    first = crop_attention(packed, 729, 16)
    assert relative_error(first, written_out(packed, 729, 16)) < 2 * ROUNDING[torch.bfloat16]
    assert all(torch.equal(crop_attention(packed, 729, 16), first) for _ in range(5))


@every_implementation
def test_large_scores_do_not_overflow(crop_attention):
    packed = 30 * some_packed(1, 20, 2, 24)
    assert relative_error(crop_attention(packed, 20, 2), written_out(packed, 20, 2)) < 1e-4


@every_implementation
@pytest.mark.parametrize("scale", [2 / 448, 0.1 / 448])
def test_a_scale_rounds_the_result_to_eight_bits(crop_attention, scale):
    packed = some_packed(2, 20, 2, 24)
    out = crop_attention(packed, 20, 2, scale)
    assert out.dtype == FLOAT8
    wanted = written_out(packed, 20, 2).clamp(-448 * scale, 448 * scale)
    assert relative_error(out.double() * scale, wanted) < ROUNDING[FLOAT8]


def test_the_instruction_names_sizes_types_and_the_transposition():
    source = product_source("multiply", 24, "f16", transposed=True, accumulates=True)
    assert "void multiply(float (&sums)[12], const unsigned int* left, unsigned long long right) {" in source
    assert "wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16 " in source
    assert "p, 1, 1, 1;" in source


def test_operands_are_numbered_in_the_order_in_which_they_are_bound():
    source = product_source("multiply", 16, "bf16", transposed=False, accumulates=False)
    assert "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;" in source
    assert "setp.ne.b32 p, %13, 0;" in source
    assert source.index('"+f"(sums[7])') < source.index('"r"(left[0])') < source.index('"l"(right)')
    assert ", bool add)" in source
