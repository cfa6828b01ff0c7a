"""Moondream's part of `kestrel-grpc verify`: compares tensors with those of a reference, within derived bounds.

Runs single prompts through the model to read intermediate tensors. No module that serves requests imports this
package. docs/numerics.md describes how tolerances are derived.
"""
