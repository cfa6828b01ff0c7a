import base64
import binascii
import os
import threading

import pytest

from kestrel_grpc.images import data_uris
from kestrel_grpc.images.data_uris import DataUris, is_embedded
from kestrel_grpc.images.image_uris import ImageFetchFailed
from kestrel_runtime.api.errors import ImageError

MAX_BYTES = 1000


def test_only_data_uris_carry_their_content():
    assert is_embedded("DATA:,abc")
    assert not is_embedded("https://example.com/data:")
    assert not is_embedded("")


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("data:;base64,!!", "not base64"),
        ("data:;base64,QUI=" + "QUJD" * 300_000, "not base64"),
        ("data:;base64", "no comma"),
        ("data:" + "a" * 300 + ",abc", "no comma"),
        ("data:," + "%41" * 1025, "escaped"),
        ("data:,\xe4", "must be escaped"),
    ],
)
async def test_data_of_another_form_is_told_why(uri, told):
    with pytest.raises(ImageFetchFailed, match=told):
        await DataUris(10**6).decode(uri)


async def test_data_above_the_limit_is_refused():
    assert await DataUris(MAX_BYTES).decode("data:," + "x" * MAX_BYTES) == b"x" * MAX_BYTES
    with pytest.raises(ImageError, match="larger than"):
        await DataUris(MAX_BYTES).decode("data:," + "x" * (MAX_BYTES + 1))


@pytest.mark.parametrize("body", ["x" * 10_000, "%41" * 10_000])
async def test_data_that_cannot_fit_is_refused_before_it_is_decoded(monkeypatch, body):
    monkeypatch.setattr(data_uris, "_decode", None)
    with pytest.raises(ImageError, match="larger than"):
        await DataUris(MAX_BYTES).decode(f"data:;base64,{body}")


async def test_much_data_is_decoded_beside_the_event_loop(monkeypatch):
    content = os.urandom(5 * 2**20)
    threads: set[threading.Thread] = set()
    decode = binascii.a2b_base64

    def note(piece: bytes, *, strict_mode: bool) -> bytes:
        threads.add(threading.current_thread())
        assert len(piece) <= 2**20  # other threads wait for no longer than one piece takes
        return decode(piece, strict_mode=strict_mode)

    monkeypatch.setattr(binascii, "a2b_base64", note)
    uri = "data:;base64," + base64.b64encode(content).decode()
    assert await DataUris(len(content)).decode(uri) == content
    assert threading.current_thread() not in threads
