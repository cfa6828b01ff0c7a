"""Generates CUDA source of Hopper's warpgroup products (wgmma), whose instruction names contain their sizes.

Source: PTX ISA, section "Asynchronous warpgroup level matrix multiply-accumulate".
"""


def product_source(name: str, columns: int, element: str, *, transposed: bool, accumulates: bool) -> str:
    """A device function `name(float (&sums)[columns / 2], const uint32 (&or *) left, uint64 right, bool add)`.

    The 64 x 16 left operand is in registers. The 16 x `columns` right operand is in shared memory, as its
    descriptor says: by columns or, if `transposed`, by rows. A function that `accumulates` always adds to `sums`.
    Another one has the argument `add`; if that is false, it overwrites `sums`. `element` is bf16 or f16.
    """
    num_sums = columns // 2
    sums = ", ".join(f"%{i}" for i in range(num_sums))
    left = ", ".join(f"%{num_sums + i}" for i in range(4))
    right, add = f"%{num_sums + 4}", f"%{num_sums + 5}"
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element}"
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(num_sums))
    inputs = ", ".join(f'"r"(left[{i}])' for i in range(4))
    return f"""
__device__ void {name}(float (&sums)[{num_sums}], const unsigned int* left, unsigned long long right{
        "" if accumulates else ", bool add"
    }) {{
    asm volatile(
        "{{ .reg .pred p; setp.ne.b32 p, {add}, 0; {instruction} "
        "{{{sums}}}, {{{left}}}, {right}, p, 1, 1, {int(transposed)}; }}"
        : {outputs}
        : {inputs}, "l"(right), "r"((int){"true" if accumulates else "add"}));
}}
"""
