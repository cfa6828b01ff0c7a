"""Images that bring their digest are bytes like others, and are not hashed again."""

import hashlib

from kestrel_runtime.api.hashed_image import HashedImage
from kestrel_runtime.api.requests import Caption
from kestrel_runtime.engine.offending_requests import fingerprint_of, image_digest

DATA = b"an image"


def test_the_digest_is_that_which_came_with_the_image():
    assert image_digest(HashedImage(DATA, b"d" * 32)) == b"d" * 32


def test_an_image_and_its_bytes_are_the_same_request():
    hashed = HashedImage(DATA, hashlib.sha256(DATA).digest())
    assert hashed == DATA
    assert image_digest(hashed) == image_digest(DATA)
    assert fingerprint_of(Caption(hashed)) == fingerprint_of(Caption(DATA))
