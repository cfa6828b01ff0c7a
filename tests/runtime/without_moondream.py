"""A pytest plugin that refuses imports of Moondream, as if its package had been deleted."""

import sys

sys.modules["kestrel_runtime.models.moondream"] = None  # pyrefly: ignore[unsupported-operation]
