"""Acceptance of a checkpoint: what it computes is compared with what a reference computed, within derived bounds.

Uses an engine as any caller does, and takes single prompts through the model by hand to look at tensors on the way.
Nothing that serves requests imports this package. How tolerances are derived stands in docs/numerics.md.
"""

from kestrel_runtime.models.moondream.verify.golden_folder import Case, GoldenFolder

__all__ = ["Case", "GoldenFolder"]
