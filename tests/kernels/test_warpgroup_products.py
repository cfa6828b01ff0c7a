from kestrel_ops.cuda.warpgroup_products import product_source


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
