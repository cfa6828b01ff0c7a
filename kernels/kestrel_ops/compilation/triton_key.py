"""Has Triton hash its own files, which takes half a second and is needed for the first kernel.

A script as well, which a start runs while torch is being imported: the package of this module imports torch, and so
does Triton up to 3.6.
"""

from __future__ import annotations

from contextlib import suppress


def prepare() -> None:
    """Hashes them; the result stays in the process."""
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


if __name__ == "__main__":
    prepare()
