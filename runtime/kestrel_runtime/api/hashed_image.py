"""The bytes of an image file together with their digest."""

from __future__ import annotations

from typing import Self


class HashedImage(bytes):
    """An encoded image whose SHA-256 is known, so that it is not computed for each request."""

    sha256: bytes

    def __new__(cls, data: bytes, sha256: bytes) -> Self:
        """A copy of `data`. The caller has computed `sha256` from it; another value would mix up cached images."""
        image = super().__new__(cls, data)
        image.sha256 = sha256
        return image
