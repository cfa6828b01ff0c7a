"""Which pages and which names are answered."""

from collections.abc import Collection

import pytest

from kestrel_grpc.access.sources import SourceGuard, SourceNotAllowed
from kestrel_runtime.api.errors import InvalidRequest

HOST = (b"host", b"localhost:8000")


def guard(
    hosts: Collection[str] | None = (), origins: Collection[str] = (), *, has_pages: bool = False
) -> SourceGuard:
    return SourceGuard(hosts, origins, has_pages=has_pages)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST",
        "a.localhost:1",
        "127.0.0.1:8000",
        "10.1.2.3",
        "[::1]:8000",
        "[::1]",
    ],
)
def test_addresses_and_localhost_are_answered(host):
    guard().check([(b"host", host.encode())], "http", "1.1")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "[x]", "a b"],
)
def test_other_names_are_not_answered(host):
    with pytest.raises(SourceNotAllowed):
        guard().check([(b"host", host.encode())], "http", "1.1")


def test_listed_names_are_answered_with_any_port():
    one = guard(("kestrel.lan",))
    for _ in range(2):
        one.check([(b"host", b"Kestrel.LAN:8000")], "http", "1.1")
    with pytest.raises(SourceNotAllowed):
        one.check([(b"host", b"other.lan")], "http", "1.1")


def test_where_tokens_are_asked_for_any_name_is_answered():
    guard(None).check([(b"host", b"kestrel.example.com")], "http", "1.1")


@pytest.mark.parametrize("headers", [[], [HOST, HOST], [HOST, (b"host", b"evil.example")]])
def test_a_request_names_one_host(headers):
    with pytest.raises(InvalidRequest):
        guard(None).check(headers, "http", "1.1")


def test_a_request_of_http_1_0_need_not_name_a_host():
    guard().check([], "http", "1.0")
    with pytest.raises(SourceNotAllowed):
        guard(has_pages=True).check([(b"origin", b"")], "http", "1.0")
    with pytest.raises(SourceNotAllowed):
        guard().check([(b"host", b"evil.example")], "http", "1.0")


@pytest.mark.parametrize("origin", [b"https://evil.example", b"null", b"http://localhost:8000", b""])
def test_pages_of_origins_that_are_not_listed_are_not_answered(origin):
    with pytest.raises(SourceNotAllowed):
        guard(None, ("https://good.example",)).check([HOST, (b"origin", origin)], "http", "1.1")


def test_pages_of_listed_origins_are_answered():
    guard(None, ("https://good.example",)).check([HOST, (b"origin", b"https://good.example")], "http", "1.1")


@pytest.mark.parametrize(
    ("host", "origin", "scheme"),
    [
        ("localhost:8000", "http://localhost:8000", "http"),
        ("LocalHost:8000", "http://localhost:8000", "http"),
        ("127.0.0.1", "http://127.0.0.1", "http"),
        ("[::1]:8000", "http://[::1]:8000", "http"),
        ("kestrel.lan:8443", "https://kestrel.lan:8443", "https"),
    ],
)
def test_pages_of_the_server_itself_are_answered_if_it_has_any(host, origin, scheme):
    headers = [(b"origin", origin.encode()), (b"host", host.encode())]
    guard(("kestrel.lan",), has_pages=True).check(headers, scheme, "1.1")
    with pytest.raises(SourceNotAllowed):
        guard(("kestrel.lan",)).check(headers, scheme, "1.1")


@pytest.mark.parametrize(
    "origin",
    [
        "https://localhost:8000",  # another scheme
        "http://localhost:3000",  # another server of this machine
        "http://localhost",
        "http://127.0.0.1:8000",
        "http://localhost:8000.evil.example",
        "http://localhost:8000/",
        "localhost:8000",
        "null",
        "",
    ],
)
def test_pages_of_other_servers_are_not_answered_by_one_with_pages(origin):
    with pytest.raises(SourceNotAllowed) as caught:
        guard(None, has_pages=True).check([HOST, (b"origin", origin.encode())], "http", "1.1")
    assert caught.value.header == "Origin"


def test_a_name_that_has_been_made_to_stand_for_this_machine_is_no_origin_of_the_server():
    headers = [(b"origin", b"http://evil.example:8000"), (b"host", b"evil.example:8000")]
    with pytest.raises(SourceNotAllowed) as caught:
        guard(has_pages=True).check(headers, "http", "1.1")
    assert caught.value.header == "Host"


def test_one_origin_of_several_that_is_not_allowed_is_enough_for_a_refusal():
    own, other = (b"origin", b"http://localhost:8000"), (b"origin", b"https://evil.example")
    for origins in ((own, other), (other, own)):
        with pytest.raises(SourceNotAllowed):
            guard(has_pages=True).check([HOST, *origins], "http", "1.1")
