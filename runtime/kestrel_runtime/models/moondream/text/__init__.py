"""The text model: the decoder, and its plain, invariant and fused paths."""
