"""Operations in CUDA C++, which Triton cannot express. Compiled at the first call."""
