"""Moondream's part of `kestrel-grpc verify`: tensors are compared with those of a reference, within derived bounds.

Takes single prompts through the model by hand to look at tensors on the way. Nothing that serves requests imports
this package. How tolerances are derived stands in docs/numerics.md.
"""
