import base64
import binascii
import os
import threading

import pytest

from kestrel_grpc.images.image_uris import (
    DataUris,
    ImageFetchFailed,
    ImageUriNotAllowed,
    Target,
    allowed_target,
    is_embedded,
    is_public,
    parse_hosts,
)
from kestrel_runtime.api.errors import ImageError

MAX_BYTES = 1000
HOSTS = parse_hosts(
    "example.com, .cdn.example.com, images.example.org:8443, http://plain.example.org, [2606:4700::1]"
)


@pytest.mark.parametrize(
    ("uri", "target"),
    [
        ("https://example.com/a.png", Target("https", "example.com", 443, "/a.png")),
        ("HTTPS://EXAMPLE.com", Target("https", "example.com", 443, "/")),
        ("https://example.com:443/a?b=c&d#e", Target("https", "example.com", 443, "/a?b=c&d")),
        ("https://a.cdn.example.com/", Target("https", "a.cdn.example.com", 443, "/")),
        ("https://a.b.cdn.example.com/", Target("https", "a.b.cdn.example.com", 443, "/")),
        ("https://images.example.org:8443/x", Target("https", "images.example.org", 8443, "/x")),
        ("http://plain.example.org/x", Target("http", "plain.example.org", 80, "/x")),
        ("https://[2606:4700::1]/x", Target("https", "2606:4700::1", 443, "/x")),
    ],
)
def test_what_is_on_a_listed_host_is_allowed(uri, target):
    assert allowed_target(uri, HOSTS) == target


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "a.png",
        "/etc/passwd",
        "file:///etc/passwd",
        "ftp://example.com/a.png",
        "gopher://example.com/",
        "https:///a.png",
        "http://example.com/",
        "https://plain.example.org/",
        "https://example.com:8443/",
        "https://example.com:99999/",
        "https://example.com:x/",
        "https://images.example.org/x",
        "https://www.example.com/",
        "https://cdn.example.com/",
        "https://evilcdn.example.com/",
        "https://example.com.evil.org/",
        "https://example.com./",
        "https://evil.org/?https://example.com/",
        "https://evil.org#@example.com/",
        "https://example.com@evil.org/",
        "https://user:password@example.com/",
        "https://evil.org\\@example.com/",
        "https://example.com\\@evil.org/",
        "https://exam\tple.com/",
        "https://example.com/\r\nHost: evil.org",
        "https://example.com/a b",
        "https://exämple.com/",
        "https://[::1/",
        "https://127.0.0.1/",
        "https://example.com/" + "a" * 3000,
    ],
)
def test_nothing_else_is_allowed(uri):
    with pytest.raises(ImageUriNotAllowed) as caught:
        allowed_target(uri, HOSTS)
    assert [violation.field for violation in caught.value.violations] == ["image.uri"]


@pytest.mark.parametrize(
    "text", ["", ",", "https://", "ftp://example.com", "example.com/path", "a@b", "a:x", "ä.com", "["]
)
def test_a_list_of_hosts_names_hosts_only(text):
    with pytest.raises(ValueError, match="must be hosts"):
        parse_hosts(text)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"])
def test_addresses_on_the_internet_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "127.0.0.1",
        "127.8.8.8",
        "169.254.169.254",
        "172.16.0.1",
        "192.168.1.1",
        "198.18.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::10.0.0.1",
        "::1.1.1.1",
        "::ffff:10.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:0:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b::7f00:1",
        "64:ff9b:1::1",
        "2001:0:4136:e378:8000:63bf:80ff:fffe",
        "2002:a00:1::1",
        "2002:7f00:1::1",
        "2001:db8::1",
        "fc00::1",
        "fec0::1",
        "fe80::1%eth0",
        "ff02::1",
    ],
)
def test_addresses_inside_a_network_are_not_public(address):
    assert not is_public(address)


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


@pytest.mark.parametrize("body", ["x" * 10_000, "%41" * 10_000, "x" * (MAX_BYTES * 4 // 3 + 2400)])
async def test_data_that_cannot_fit_is_refused_before_it_is_decoded(monkeypatch, body):
    monkeypatch.setattr(binascii, "a2b_base64", None)
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
