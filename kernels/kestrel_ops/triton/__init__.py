"""Operations as Triton kernels, for CUDA devices; on a CPU they run in the interpreter of Triton alone."""
