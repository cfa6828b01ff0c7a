"""Base64 and `data:` URLs: valid input and the bytes that it stands for, and reasons of refusals."""

import base64
import binascii
import itertools
import os
import random
import re
from urllib.parse import quote

import pytest

from kestrel_grpc.images.data_urls import DataTooLarge, DataUnreadable, decode_base64, decode_data_url, is_data_url

CONTENT = bytes(range(256)) + b"\xfb\xff\xbf"  # whose base64 has all characters
PLAIN = base64.b64encode(CONTENT).decode()
HEAD = "data:image/png;base64,"
LINES = [PLAIN[start : start + 76] for start in range(0, len(PLAIN), 76)]
MAX_BYTES = 1000


def decoded(url: str, max_bytes: int = MAX_BYTES) -> bytes:
    return decode_data_url(url.encode("latin-1"), max_bytes)


@pytest.mark.parametrize(
    "url",
    [
        HEAD + PLAIN,
        *(HEAD + end.join(LINES) + end for end in ("\n", "\r\n", "\r", " ", "\t", "\f", "\n \t")),
        *(HEAD + space + PLAIN for space in (" ", "\n", "\f")),
        HEAD + quote(PLAIN, safe=""),
        HEAD + re.sub("%..", lambda found: found[0].lower(), quote(PLAIN, safe="")),
        HEAD + quote("\r\n".join(LINES) + "\r\n", safe=""),
        HEAD + "".join(f"%{ord(char):02x}" for char in PLAIN),
        HEAD + PLAIN + "#fragment",
        *(start + HEAD + PLAIN for start in (" ", "\n", "\t \x00")),
        *(
            f"data:{media_type},{PLAIN}"
            for media_type in (
                ";base64",
                ";BASE64",
                "image/png; base64",
                "image/png;   Base64",
                "image/png;base64 ",
                "image/png;charset=utf-8;base64",
                'image/png;name="a.png";base64',
                "image/png;\r\n base64",
                "IMAGE/PNG;base64",
                "no type;base64",
            )
        ),
        f"DATA:;base64,{PLAIN}",
    ],
)
def test_a_url_that_browsers_take_has_its_content(url: str):
    assert is_data_url(url.encode("latin-1")[:256])
    assert decoded(url) == CONTENT


@pytest.mark.parametrize("num_bytes", range(5))
def test_padding_may_be_absent(num_bytes: int):
    content = CONTENT[-num_bytes:] if num_bytes else b""
    whole = base64.b64encode(content).decode()
    for text in {whole, whole.rstrip("="), whole.replace("=", "%3D"), " ".join(whole)}:
        assert decoded(HEAD + text) == content


def forgiving(text: str) -> bytes | None:
    """The standard's algorithm, step by step; None for failure."""
    text = re.sub(r"[\t\n\f\r ]", "", text)
    if len(text) % 4 == 0:
        text = re.sub("={1,2}$", "", text)
    if len(text) % 4 == 1 or re.search("[^A-Za-z0-9+/]", text):
        return None
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    bits = "".join(f"{alphabet.index(char):06b}" for char in text)
    return bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits) - 7, 8))


def test_short_texts_are_decoded_as_the_standard_says():
    chance = random.Random(5)
    texts = ["".join(chars) for length in range(6) for chars in itertools.product("aQ=+", repeat=length)]
    texts += ["".join(chance.choices("aZ9+/== \n-_!\x0b", k=chance.randrange(10))) for _ in range(2000)]
    for text in texts:
        try:
            found = decode_base64(text.encode(), MAX_BYTES)
        except DataUnreadable:
            found = None
        assert found == forgiving(text), repr(text)


def test_bits_behind_the_last_byte_are_dropped():
    assert decode_base64(b"YR==", 1) == decode_base64(b"YR", 1) == b"a"


@pytest.mark.parametrize("ending", ["\n", "%0A", ""])
def test_pieces_end_anywhere(ending: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kestrel_grpc.images.data_urls._PIECE_BYTES", 8)
    lines = (PLAIN[start : start + 7] for start in range(0, len(PLAIN), 7))
    written = ending.join(lines) if ending else PLAIN
    assert decoded(HEAD + written.replace("+", "%2B")) == CONTENT
    with pytest.raises(DataUnreadable, match="behind its padding"):
        decoded(HEAD + "QUI=" + written)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (HEAD + "a", "is not base64"),
        (HEAD + "YQ=", "is not base64"),
        (HEAD + "YQ===", "is not base64"),
        (HEAD + "YWJj=", "is not base64"),
        (HEAD + "=", "is not base64"),
        (HEAD + "YQ==YQ==", "is not base64: it goes on behind its padding"),
        (HEAD + "YQ\x0b==", "is not base64"),
        (HEAD + "-_-_", "is not base64 but base64url: write + for - and / for _"),
        (HEAD + "%252B", "is not base64"),
        (HEAD + "%4" + "A" * 5, "is not base64"),
        (HEAD + "%41" * 1025, "holds more than 1024 escaped characters; use base64"),
        ("data:image/png;base64", "has no comma within 256 characters"),
        ("data:" + "a" * 300 + ",abc", "has no comma within 256 characters"),
        ("data:," + "%41" * 1025, "holds more than 1024 escaped characters; use base64"),
    ],
)
def test_data_of_another_form_is_refused_with_its_reason(url: str, reason: str):
    with pytest.raises(DataUnreadable, match=f"^{re.escape(reason)}$"):
        decoded(url, 10_000)


@pytest.mark.parametrize("media_type", ["base64", "image/png;base64;charset=utf-8", "text/plain;base6", ""])
def test_data_that_are_not_in_base64_are_as_they_stand(media_type: str):
    url = f"data:{media_type},a%20b\nc%FF".encode()
    assert decode_data_url(url, MAX_BYTES) == b"a bc\xff"
    with pytest.raises(DataUnreadable, match="is a data URL that is not in base64"):
        decode_data_url(url, MAX_BYTES, needs_base64=True)


@pytest.mark.parametrize("num_bytes", [98, 99, 100])
def test_the_limit_counts_bytes_and_no_line_breaks_and_escapes(num_bytes: int, monkeypatch: pytest.MonkeyPatch):
    content = os.urandom(num_bytes)
    plain = base64.b64encode(content).decode()
    forms = [HEAD + plain, HEAD + "\r\n".join(plain), HEAD + quote(plain, safe=""), HEAD + plain.rstrip("=")]
    forms.append("data:," + quote(content, safe=""))
    for url in forms:
        assert decoded(url, num_bytes) == content
    monkeypatch.setattr(binascii, "a2b_base64", None)  # nothing is decoded
    for url in forms:
        with pytest.raises(DataTooLarge):
            decoded(url, num_bytes - 1)
