"""The address of a call's caller, from its connection and from what trusted proxies say."""

import pytest

from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.caller_address import CallerAddresses
from kestrel_grpc.config.options import ConfigurationError, ServerConfig


def address(peer: str, *forwarded: str, trusted: str | None = None) -> str:
    config = ServerConfig.parse({"trusted_proxies": trusted}, {})
    call = CallContext(tuple(("x-forwarded-for", value) for value in forwarded), None, "")
    call.peer = lambda: peer
    return CallerAddresses(config.trusted_proxies or ()).of(call)


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:192.0.2.1:5000", "192.0.2.1"),
        ("ipv6:%5B2001:db8::1%5D:5000", "2001:db8::1"),
        ("ipv6:[::ffff:192.0.2.1]:5000", "192.0.2.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", "fe80::1"),
        ("192.0.2.1:5000", "192.0.2.1"),
        ("2001:db8::1:5000", "2001:db8::1"),
        ("unix:", "unix"),
        ("unix:/run/kestrel.sock", "unix"),
        ("", "unknown"),
        ("\x1b[31m:1", "unknown"),
    ],
)
def test_the_address_is_that_of_the_connection(peer, expected):
    assert address(peer) == expected
    assert address(peer, "203.0.113.9") == expected


PROXY = "ipv4:10.0.0.5:5000"


@pytest.mark.parametrize(
    ("peer", "trusted", "forwarded", "expected"),
    [
        (PROXY, "10.0.0.0/8", ["203.0.113.9"], "203.0.113.9"),
        (PROXY, "10.0.0.5", ["203.0.113.9"], "203.0.113.9"),
        (PROXY, "192.0.2.1, 10.0.0.0/8", ["203.0.113.9"], "203.0.113.9"),
        (PROXY, "192.0.2.0/24", ["203.0.113.9"], "10.0.0.5"),
        ("10.0.0.5:5000", "10.0.0.0/8", ["203.0.113.9:40000"], "203.0.113.9"),
        (PROXY, "10.0.0.0/8", ["[2001:db8::9]:40000"], "2001:db8::9"),
        (PROXY, "10.0.0.0/8", ["invented, 198.51.100.7, 203.0.113.9, 10.0.0.6"], "203.0.113.9"),
        (PROXY, "10.0.0.0/8", ["198.51.100.7", "203.0.113.9"], "203.0.113.9"),
        (PROXY, "10.0.0.0/8", ["10.0.0.7, 10.0.0.6"], "10.0.0.7"),
        (PROXY, "10.0.0.0/8", ["203.0.113.9, unknown"], "10.0.0.5"),
        (PROXY, "10.0.0.0/8", ["203.0.113.9, nonsense, 10.0.0.6"], "10.0.0.6"),
        (PROXY, "10.0.0.0/8", ["\x1b[31m"], "10.0.0.5"),
        (PROXY, "10.0.0.0/8", [""], "10.0.0.5"),
        (PROXY, "10.0.0.0/8", [], "10.0.0.5"),
        (PROXY, "::/0", ["203.0.113.9"], "10.0.0.5"),
        ("ipv6:%5B::1%5D:5", "::1", ["203.0.113.9"], "203.0.113.9"),
        ("ipv6:%5B::ffff:10.0.0.5%5D:5", "10.0.0.0/8", ["203.0.113.9"], "203.0.113.9"),
        (PROXY, "::ffff:10.0.0.5", ["203.0.113.9"], "203.0.113.9"),
        (PROXY, "::ffff:10.0.0.0/104", ["203.0.113.9, ::ffff:10.0.0.6"], "203.0.113.9"),
        (PROXY, "::ffff:192.0.2.0/120", ["203.0.113.9"], "10.0.0.5"),
        ("unix:", "unix", ["203.0.113.9"], "203.0.113.9"),
        ("unix:", "10.0.0.0/8", ["203.0.113.9"], "unix"),
        (PROXY, "10.0.0.0/8", [",".join(["10.0.0.1"] * 10_000)], "10.0.0.1"),
    ],
)
def test_what_a_trusted_proxy_says_counts_and_nothing_else(peer, trusted, forwarded, expected):
    assert address(peer, *forwarded, trusted=trusted) == expected


@pytest.mark.parametrize("text", ["", "proxy.example.com", "10.0.0.0/33", "10.0.0.1,", "*"])
def test_what_is_no_network_is_refused(text):
    with pytest.raises(ConfigurationError, match=r"--trusted-proxies: .*must be addresses or networks"):
        ServerConfig.parse({"trusted_proxies": text}, {})
