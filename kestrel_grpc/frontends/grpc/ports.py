"""Opens the ports of gRPC's servers: channel arguments, TCP ports, the Unix socket, and certificates.

gRPC ignores a channel argument whose name it does not know, so a test looks for all names in its library. Other
tests show the effects; the row `endless-headers` of `bench.attacks` shows that of the read buffer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from kestrel_grpc.access.tls import CertificateFiles, Pem
from kestrel_grpc.process.free_ports import PortUnavailable, address_of, require_free_port, require_free_socket

MAX_CONCURRENT_STREAMS = 100
"""The most open calls of one connection. The server announces it; further calls wait in the client."""
MAX_DEALLOCATING_STREAMS = 200
"""The most calls of one connection that have ended or were reset but still take memory. Further calls are
refused."""
MAX_PENDING_CALLS = 20_000
"""The most calls of all connections that wait for the event loop."""
UNREAD_BYTES = 256 * 1024
"""The bytes of a call's message that a client may send before the server reads it."""
READ_BUFFER_BYTES = 1024 * 1024
"""The most bytes of a connection that are read at once."""
MAX_PING_STRIKES = 100
"""The number of early pings in a row after which the connection is closed. A client that pings every 10 seconds
sends seven at once after a minute of network delay; a hundred are a flood."""
_MIN_PING_INTERVAL_MS = 10_000
# The owner and the group of the socket may write to it, and so may call.
_SOCKET_MODE = 0o660


def server_options(max_message_bytes: int, *, shares_ports: bool = False) -> tuple[tuple[str, int], ...]:
    """Returns the options for `grpc.aio.server`; `max_message_bytes` is the largest request message that is
    accepted.

    If `shares_ports` is True, other processes of this server listen on the same ports.
    """
    return (
        # Messages that are somewhat too large reach the server, which says why it refuses them. Larger ones would
        # take too much memory: gRPC refuses them when their length has arrived, before their content does.
        ("grpc.max_receive_message_length", max_message_bytes + max_message_bytes // 3),
        ("grpc.max_send_message_length", -1),
        # Two servers must not share a port by accident.
        ("grpc.so_reuseport", int(shares_ports)),
        # Without it one connection can open and reset calls faster than the event loop can end them.
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        # A call that its client has reset no longer counts as open, but waits with all others until the event loop
        # takes it. Without these bounds a connection that resets its calls at once fills that queue, of which gRPC
        # drops calls at random. The first alone would count finished calls as open until their memory is freed, and
        # refuse ordinary clients that cancel some calls; the second is how many of them a connection may have.
        ("grpc.http.overload_protection", 1),
        ("grpc.http2.max_deallocating_streams", MAX_DEALLOCATING_STREAMS),
        # With the bounds of each connection the queue is bounded by their number; beyond this many calls gRPC would
        # drop calls of any connection.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        # With it gRPC raises the window of every call to what the network carries, whether the call is read or not:
        # on a fast network whole messages would be held in memory for calls that are not admitted yet.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
        # Otherwise the memory for what a connection sends next doubles while it sends faster than gRPC reads, up to
        # 512 MiB; frames that no window bounds, such as headers without end, come that fast.
        ("grpc.experimental.tcp_max_read_buffer_size", READ_BUFFER_BYTES),
        # A compressed message can be a thousand times larger once it is decompressed, which gRPC does before the
        # length is checked. Images are compressed already. So compressed messages stay compressed, and the server
        # refuses them; gRPC would do so without the details that every refusal has.
        ("grpc.per_message_decompression", 0),
        # During a long prefill nothing is sent; clients that ping meanwhile must not be disconnected.
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # The same for a client that hangs while its kernel still acknowledges packets; the default is a minute.
        ("grpc.http2.ping_timeout_ms", 20_000),
    )


def open_port(
    server: grpc.aio.Server,
    host: str,
    port: int,
    certificate: CertificateFiles | None = None,
    *,
    is_shared: bool = False,
) -> int:
    """Listens on a port and returns it; 0 takes a free one. Raises `PortUnavailable`.

    If `is_shared` is True, other processes of this server listen on the port, too.
    """
    if not is_shared:
        require_free_port(host, port)
    address = address_of(host, port)
    try:
        if certificate is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, server_credentials(certificate))
    except RuntimeError as error:
        raise PortUnavailable(f"cannot listen on {address}") from error


def open_unix_socket(server: grpc.aio.Server, path: Path) -> None:
    """Listens on a socket at a path; gRPC removes it when the server stops. Raises `PortUnavailable`."""
    require_free_socket(path)
    try:
        server.add_insecure_port(f"unix:{path}")
        path.chmod(_SOCKET_MODE)
    except (RuntimeError, OSError) as error:
        raise PortUnavailable(f"cannot listen on {path}") from error


def server_credentials(certificate: CertificateFiles) -> grpc.ServerCredentials:
    """Returns credentials that follow their files: each new connection gets the certificate that was read last."""

    served = certificate.value

    def fetch() -> Any:  # gRPC's types leave out the None that says that nothing has changed
        """Returns the certificate for a new connection. Called in one of gRPC's threads."""
        nonlocal served
        if certificate.value is served:
            return None
        served = certificate.value
        return _configuration(served)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served), fetch, require_client_authentication=certificate.asks_clients
    )


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], root_certificates=pem.client_ca)
