"""Which pages and which names are answered."""

import pytest

from kestrel_grpc.access.sources import SourceGuard, SourceNotAllowed

HOST = (b"host", b"localhost:8000")


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
    SourceGuard((), ()).check([(b"host", host.encode())])


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "[x]", "a b"],
)
def test_other_names_are_not_answered(host):
    with pytest.raises(SourceNotAllowed):
        SourceGuard((), ()).check([(b"host", host.encode())])


def test_listed_names_are_answered_with_any_port():
    guard = SourceGuard(("kestrel.lan",), ())
    for _ in range(2):
        guard.check([(b"host", b"Kestrel.LAN:8000")])
    with pytest.raises(SourceNotAllowed):
        guard.check([(b"host", b"other.lan")])


def test_where_tokens_are_asked_for_any_name_is_answered():
    SourceGuard(None, ()).check([(b"host", b"kestrel.example.com")])


@pytest.mark.parametrize("headers", [[], [HOST, HOST], [HOST, (b"host", b"evil.example")]])
def test_a_request_names_one_host(headers):
    with pytest.raises(SourceNotAllowed):
        SourceGuard(None, ()).check(headers)


@pytest.mark.parametrize("origin", [b"https://evil.example", b"null", b"http://localhost:8000", b""])
def test_pages_of_origins_that_are_not_listed_are_not_answered(origin):
    with pytest.raises(SourceNotAllowed):
        SourceGuard(None, ("https://good.example",)).check([HOST, (b"origin", origin)])


def test_pages_of_listed_origins_are_answered():
    SourceGuard(None, ("https://good.example",)).check([HOST, (b"origin", b"https://good.example")])
