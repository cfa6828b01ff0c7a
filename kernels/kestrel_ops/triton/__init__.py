"""Operations as Triton kernels for CUDA devices. On a CPU they run only in the interpreter of Triton."""
