"""Operations by a library that comes with torch, for CUDA devices."""
