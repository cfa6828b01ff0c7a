"""Compares Moondream's tensors with those of a reference, within derived bounds, for `kestrel-grpc verify`.

Runs single prompts through the model to read intermediate tensors. No module that serves requests imports this
package. docs/numerics.md describes how tolerances are derived.
"""
