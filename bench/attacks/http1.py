"""Attacks on the HTTP port and the port of metrics by requests that are refused or not completed."""

import contextlib
import selectors
import socket
import time
from collections.abc import Mapping
from functools import partial

from bench.attacks.attack import Attack, Outcome, Victim

_TIMEOUT_S = 5.0
_HTTP = ("--http-port", "0")
NUM_CONNECTIONS, NUM_WITHHELD = 16, 750
UNKNOWN = b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n"
OFFERED = (
    b"GET /nothing HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\n"
)
WITHHELD = (
    b"POST /v1/query HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
)

_FORM = (
    b'--b\r\ncontent-disposition: form-data; name="question"\r\n\r\n?\r\n'
    b'--b\r\ncontent-disposition: form-data; name="settings.max_tokens"\r\n\r\n1\r\n--b--\r\n'
)
FOREIGN_FORM = (
    b"POST /v1/query HTTP/1.1\r\nhost: localhost\r\nsec-fetch-site: cross-site\r\n"
    b"content-type: multipart/form-data; boundary=b\r\ncontent-length: %d\r\n" % len(_FORM)
)
"""The head of a form of another site's page without its last, empty line; as from old browsers, no `Origin`."""


def _ask_at_once(number: int, request: bytes, victim: Victim, seconds: float, prepared: None) -> Outcome:
    """So many connections; each sends the request again as soon as it is answered, and connects anew if closed."""
    outcome, end = Outcome(), time.monotonic() + seconds
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:

        def connect() -> None:
            connection = stack.enter_context(socket.socket())
            try:
                connection.settimeout(_TIMEOUT_S)
                connection.connect((victim.host, victim.http_port))
                connection.sendall(request)
            except OSError:
                outcome["not connected"] += 1
                connection.close()
                return
            outcome["connections"] += 1
            selector.register(connection, selectors.EVENT_READ)

        while (left_s := end - time.monotonic()) > 0.0:
            missing = number - len(selector.get_map())
            for _ in range(min(missing, 32)):
                connect()
            for key, _ in selector.select(min(left_s, 0.01)):
                connection: socket.socket = key.fileobj  # pyrefly: ignore[bad-assignment] no other is registered
                try:
                    data = connection.recv(65_536)
                    if data.startswith(b"HTTP/1.1 "):
                        outcome[data[9:12].decode("ascii")] += 1
                    if data.rstrip().endswith(b"}"):
                        connection.sendall(request)
                    if data:
                        continue
                except OSError:
                    pass
                selector.unregister(connection)
                connection.close()
    return +outcome


def _send_foreign_forms(number: int, victim: Victim, seconds: float, prepared: None) -> Outcome:
    """Forms of a page of another site, with a token that is good, on so many connections."""
    request = FOREIGN_FORM + b"authorization: Bearer %b\r\n\r\n" % victim.token.encode() + _FORM
    return _ask_at_once(number, request, victim, seconds, prepared)


def _forms_are_refused(outcome: Mapping[str, int], log: str) -> list[str]:
    problems = [] if outcome.get("403", 0) else ["no form was refused"]
    return [*problems, "forms of another site were answered"] if outcome.get("200", 0) else problems


def _never_refused_for_connections(outcome: Mapping[str, int], log: str) -> list[str]:
    return [] if outcome.get("connections", 0) else ["nothing was attacked"]


ATTACKS = (
    Attack(
        "unknown-paths",
        f"404s on {2 * NUM_CONNECTIONS} HTTP connections, two processes, no token",
        partial(_ask_at_once, NUM_CONNECTIONS, UNKNOWN),
        num_processes=2,
        server_options=_HTTP,
        leaves_half=True,
        check=_never_refused_for_connections,
    ),
    Attack(
        "offered-protocols",
        f"404s on {2 * NUM_CONNECTIONS} HTTP connections that offer HTTP/2, two processes, no token",
        partial(_ask_at_once, NUM_CONNECTIONS, OFFERED),
        num_processes=2,
        server_options=_HTTP,
        leaves_half=True,
        check=_never_refused_for_connections,
    ),
    Attack(
        "foreign-forms",
        f"forms of a page of another site on {2 * NUM_CONNECTIONS} HTTP connections, two processes, with a token",
        partial(_send_foreign_forms, NUM_CONNECTIONS),
        num_processes=2,
        server_options=_HTTP,
        leaves_half=True,
        check=_forms_are_refused,
    ),
    Attack(
        "withheld-bodies",
        f"{2 * NUM_WITHHELD} HTTP connections that withhold bodies, two processes, no token",
        partial(_ask_at_once, NUM_WITHHELD, WITHHELD),
        num_processes=2,
        server_options=_HTTP,
        leaves_half=True,
        check=_never_refused_for_connections,
    ),
)
