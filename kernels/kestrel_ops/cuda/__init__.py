"""Operations in CUDA itself, for what Triton cannot say. Compiled on the device's machine when first called."""
