"""Hostile bodies of HTTP requests: truncated, wrongly chunked, compressed, nested, slow, from other sites.

`conversation` draws the bytes for one connection from a seed; `hear` sends them and checks what comes back: a
status that docs/errors.md has, or a closed connection.
"""

import base64
import gzip
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

STATUSES = frozenset((200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 501, 503, 504, 505))
_PATIENCE_S = 30.0
_AT_ONCE = 8
_IMAGE = base64.b64encode(bytes(range(256)) * 4).decode()
_IMAGE_NAMES = (f"sha256:{'0' * 64}", "sha256:", "%2e%2e%2f", "a" * 5000, "%00")
_PAUSE_S = 0.05
PATHS = {
    "rest": ("/v1/query", "/v1/caption", "/v1/point", "/v1/detect", "/v1/segment", "/v1/chat", "/v1/embed"),
    "forms": ("/v1/query", "/v1/caption", "/v1/point", "/v1/detect", "/v1/segment", "/v1/gaze", "/v1/embed"),
    "images": ("/v1/images", *(f"/v1/images/{name}" for name in _IMAGE_NAMES)),
    "openai": ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
}

Draw = random.Random


def valid(path: str, draw: Draw) -> dict[str, Any]:
    """A request that a client might send."""
    if path == "/v1/chat/completions":
        parts = [
            {"type": "text", "text": "?"},
            {"type": "image_url", "image_url": {"url": f"data:;base64,{_IMAGE}"}},
        ]
        content = draw.choice(("?", [*parts, parts[1]], [parts[0]]))
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        turns = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "x"},
        ]
        messages = [{"role": "user", "content": content}, *turns[: draw.choice((0, 2))]]
        return {"model": "fake", "messages": messages, "stream": draw.random() < 0.5, **tools(draw)}
    if path == "/v1/responses":
        image = {"type": "input_image", "image_url": f"data:;base64,{_IMAGE}"}
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "?"}, image]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "x"},
        ]
        schema = {"type": "object", "properties": {"a": {"const": strange_value(draw)}}}
        function = {"type": "function", "name": "f", "parameters": schema}
        shape = {"format": {"type": draw.choice(("text", "json_schema")), "name": "n", "schema": schema}}
        fields = draw.choice(
            ({}, {}, {"tools": [function]}, {"tools": [function], "tool_choice": "required"}, {"text": shape})
        )
        return {"model": "fake", "input": draw.choice(("?", items)), "stream": draw.random() < 0.5, **fields}
    if path == "/v1/completions":
        return {"model": "fake", "prompt": "?", "stream": draw.random() < 0.5}
    if path == "/v1/chat":
        urls = [_IMAGE, f"data:;base64,{_IMAGE}", "https://example.com/x", f"sha256:{'0' * 64}"]
        roles = ("user", "user", "assistant", "system")
        messages = [
            {"role": draw.choice(roles), "content": "?", "image_urls": draw.sample(urls, draw.randrange(4))}
            for _ in range(draw.choice((1, 2, 3, 200, 300)))
        ]
        return {"messages": messages, "stream": draw.random() < 0.5}
    if path == "/v1/query":
        return {"question": "?", "stream": draw.random() < 0.5, "settings": {"temperature": 0.5}}
    if path == "/v1/embeddings":
        part = {"type": "image_url", "image_url": {"url": f"data:;base64,{_IMAGE}"}}
        forms = (_IMAGE, part, {"image": _IMAGE}, {"content": [part]}, "a text", [1, 2], {"type": [], "url": 1})
        return {
            "model": "fake",
            "input": draw.choice((draw.choice(forms), draw.choices(forms, k=draw.choice((2, 20))))),
        }
    body: dict[str, Any] = {"image_url": _IMAGE}
    if path == "/v1/embed":
        return {**body, "stream": draw.random() < 0.5, "dtype": draw.choice(("float16", "float32", "int8"))}
    if path == "/v1/segment":
        body["mask_format"] = draw.choice(("svg", "polygon", "rle", "png", "bmp"))
    if path == "/v1/caption":
        return body
    if path in ("/v1/point", "/v1/detect") and draw.random() < 0.5:
        names = draw.choice((["bird", "beak"], ["bird"] * 64, ["bird"] * 65, [""], []))
        return {**body, "objects": names, "min_score": draw.choice((0.5, 2, None)), "stream": draw.random() < 0.5}
    return {**body, "object": "bird"}


def tools(draw: Draw) -> dict[str, Any]:
    """The fields of a chat about tools, often none."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"$ref": "#"}}}}
    given = [{"type": "function", "function": function}, {"type": "function", "function": {"name": "g"}}]
    named = {"type": "function", "function": {"name": "f"}}
    choice = draw.choice(("auto", "none", "required", named))
    return draw.choice(({}, {"tools": given, "tool_choice": choice}))


def strange_value(draw: Draw, depth: int = 0) -> Any:
    """Any JSON value."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: draw.random() < 0.5,
        lambda: draw.choice((0, -1, 2**31, 2**63, 2**64, 10**300, 1e308, -0.0, 0.1)),
        lambda: draw.choice(
            ("", "?", "\0", "a" * 70_000, "a" * 140_000, "\ud800", "\U0001f426", "data:,", "https://example.com/x")
        ),
        lambda: [strange_value(draw, depth + 1) for _ in range(draw.randrange(4))],
        lambda: {
            draw.choice((str(number), "\ud800")): strange_value(draw, depth + 1)
            for number in range(draw.randrange(4))
        },
    )
    return draw.choice(kinds[:4] if depth > 3 else kinds)()


def body(path: str, draw: Draw) -> bytes:
    """A body that may be anything."""
    if path == "/v1/images":
        return draw.choice((b"", b"broken", b"\x89PNG\r\n\x1a\n")) + draw.randbytes(draw.choice((0, 300, 300_000)))
    request = valid(path, draw)
    kind = draw.randrange(10)
    if kind == 0:
        request[draw.choice(tuple(request))] = strange_value(draw)
    elif kind == 1:
        names = (
            *("x", "n", "settings", "image_url", "spatial_refs", "messages", "\ud800", "\U0001f426\udc26"),
            *("tools", "tool_choice", "metadata", "text", "stop", "response_format", "constraint", "a" * 140_000),
        )
        request[draw.choice(names)] = strange_value(draw)
    elif kind == 2:
        return draw.choice((b"[", b'{"a":', b'{"messages":[')) * draw.choice((100, 5000, 100_000))
    elif kind == 3:
        return draw.randbytes(draw.randrange(300))
    elif kind == 4:
        return b'{"x": [' + draw.choice((b"{},", b"1,", b'"",', b"[],")) * 60_000 + b"0]}"
    elif kind == 5:
        return b'{"question": "' + b"\\" * draw.choice((99, 100, 200_001)) + b'"}'
    text = json.dumps(request).encode()
    if kind == 6:
        position = draw.randrange(len(text))
        return text[:position] + draw.randbytes(3) + text[position + 1 :]
    if kind == 7:
        return text[: draw.randrange(len(text))]
    return text


def form(path: str, draw: Draw) -> bytes:
    """A form that may be anything; its boundary is `b`."""
    fields: list[tuple[str, bytes]] = [("question", b"?")] if path == "/v1/query" else []
    fields += [("object", b"bird")] if path in ("/v1/point", "/v1/detect", "/v1/segment") else []
    fields += [("eye", b"[0.5, 0.5]")] if path == "/v1/gaze" else []
    picture = draw.randbytes(draw.choice((1, 300, 300_000)))
    fields.append((draw.choice(('image"; filename="x.png', 'image"\r\nContent-Type: "image/png')), picture))
    kind = draw.randrange(8)
    if kind == 0:
        names = ("settings", "settings.temperature", "settings.logit_bias", "spatial_refs", "\ud800", "a" * 5000)
        value = json.dumps(strange_value(draw)).encode()
        fields.append((draw.choice(names), draw.choice((value, b"[" * 100_000, draw.randbytes(20), b"\r\n--b"))))
    elif kind == 1:
        fields *= draw.choice((2, 20, 500))
    parts = [
        b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        % (name.encode(errors="surrogatepass"), value)
        for name, value in fields
    ]
    text = b"".join(parts) + b"--b--\r\n"
    if kind == 2:
        return text[: draw.randrange(len(text))]
    if kind == 3:
        places = [place for place in range(len(text)) if text[place] in b'\r\n-b";=:'][:200]
        place = draw.choice(places)
        return text[:place] + draw.choice((b"", b"\r", b"\n", b"--b\r\n", b'"', b"\0")) + text[place + 1 :]
    if kind == 4:
        return draw.choice((b"--b\r\n", b"--b", b"\r\n\r\n", b"\r\n--b\r\n\r\n")) * draw.choice((1, 50, 50_000))
    return text


@dataclass(frozen=True)
class Conversation:
    """What is sent on one connection: `pieces`, with pauses between them if it `is_slow`.

    With `is_finished` the client then says that it sends no more.
    """

    pieces: list[bytes]
    is_slow: bool
    is_finished: bool


def conversation(api: str, seed: int) -> Conversation:
    """Drawn from the seed."""
    draw = random.Random(f"{api} {seed}")
    path = draw.choice(PATHS[api])
    content = form(path, draw) if api == "forms" else body(path, draw)
    headers = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(content))}
    verbs = ("POST",)
    if api == "images":
        headers["Content-Type"] = "image/png"
        verbs = ("PUT",) if path == "/v1/images" else ("GET", "DELETE")
    elif api == "forms":
        headers["Content-Type"] = draw.choice(
            ("multipart/form-data; boundary=b",) * 8 + ('multipart/form-data; boundary="b', "image/png")
        )
        if draw.random() < 0.1:
            headers["Sec-Fetch-Site"] = draw.choice(("cross-site", "same-site", "none", "same-origin", "\x7f"))
        parameters = ("?question=?", "?object=bird", "?eye=[0.5,0.5]", "?" + "&x" * 100, "?settings.n=%ff")
        path += draw.choice(("",) * 10 + parameters)
    sent = content
    kind = draw.randrange(16)
    if kind == 0:
        headers["Content-Length"] = str(len(content) + draw.choice((-5, -1, 1, 1000, 2**40)))
    elif kind == 1:
        headers["Content-Encoding"] = draw.choice(("gzip", "br", "deflate"))
        sent = gzip.compress(content)
        headers["Content-Length"] = str(len(sent))
    elif kind in (2, 3, 4):
        del headers["Content-Length"]
        others = ("gzip, chunked", "chunked, gzip", "gzip", "identity", "x")
        headers["Transfer-Encoding"] = draw.choice(("chunked",) * 10 + others)
        sent = chunked(content, draw)
        if kind == 4:
            headers["Content-Length"] = str(len(content))
    elif kind == 5:
        headers["Content-Type"] = "text/plain"
        headers["Origin"] = "https://evil.example"
    elif kind == 6:
        headers["Host"] = draw.choice(("evil.example", "evil.example:80", "", "localhost\r\nHost: evil.example"))
    elif kind == 7:
        headers["Content-Type"] = draw.choice(
            ("text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data")
        )
    elif kind == 8:
        headers[draw.choice(("X-Request-Timeout", "X-Request-Id", "Expect", "Connection", "Upgrade"))] = (
            draw.choice(("0", "1e-3", "nan", "100-continue", "upgrade", "websocket", "close", "\x01", "a" * 70_000))
        )
    if kind in (13, 14) or (kind in (2, 3, 11, 12) and draw.random() < 0.5):
        headers["Connection"] = draw.choice(
            ("Upgrade", "upgrade, HTTP2-Settings", "keep-alive, Upgrade", "close, Upgrade")
        )
        headers["Upgrade"] = draw.choice(("h2c", "websocket", "TLS/1.2", "h2c, websocket"))
    verb = draw.choice(
        verbs * (12 // len(verbs)) + ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")
    )
    target = draw.choice((path,) * 12 + (path + "?x=1", "/v1//query", "/%00", "*", "http://evil.example/v1/query"))
    version = draw.choice(("1.1",) * 24 + ("1.0", "2.0", "0.9"))
    head = (
        f"{verb} {target} HTTP/{version}\r\n"
        + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        + "\r\n"
    )
    whole = head.encode("latin-1") + sent
    if kind == 9:
        whole *= draw.choice((2, 20))
    elif kind == 10:
        whole += draw.randbytes(40)
    pieces = [whole]
    if kind in (11, 12):
        cut = sorted(draw.randrange(len(whole)) for _ in range(3))
        pieces = [whole[start:end] for start, end in zip([0, *cut], [*cut, None], strict=True)]
    return Conversation(pieces, kind == 12, draw.random() < 0.3)


def chunked(content: bytes, draw: Draw) -> bytes:
    """The content in chunks, some of which are wrong."""
    size = draw.choice((1, 7, 1000, 100_000))
    pieces = [content[start : start + size] for start in range(0, min(len(content), 2000 * size), size)]
    framed = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    if framed and draw.random() < 0.5:
        wrong = (
            b"zz\r\n",
            b"-1\r\n\r\n",
            b"ffffffffffffffffff\r\n",
            b"5;" + b"x" * 5000 + b"\r\nhello\r\n",
            b"3\nabc\n",
        )
        framed[draw.randrange(len(framed))] = draw.choice(wrong)
    ends = (
        b"0\r\n\r\n",
        b"",
        b"0\r\nX: y\r\n\r\n",
        b"0\r\n" + b"X: y\r\n" * 9000,
        b"0\r\nHost: evil.example\r\nAuthorization: Bearer x\r\nX-Request-Timeout: x\r\n\r\n",
        b"0\r\nContent-Length: 3\r\n\r\nabc",
        b"0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    )
    return b"".join(framed) + draw.choice(ends)


def hear(address: tuple[str, int], said: Conversation) -> str:
    """What the server makes of it: the status of its first response, or `closed`."""
    with socket.create_connection(address, timeout=_PATIENCE_S) as connection:
        answer = b""
        try:
            for piece in said.pieces:
                connection.sendall(piece)
                if said.is_slow:
                    time.sleep(_PAUSE_S)
            if said.is_finished:
                connection.shutdown(socket.SHUT_WR)
            else:
                connection.settimeout(0.5)
            while b"\r\n\r\n" not in answer and (data := connection.recv(65_536)):
                answer += data
        except TimeoutError:
            if said.is_finished:
                raise
            return "waits"  # for the rest of what was announced
        except OSError:
            return "closed"
    if not answer:
        return "closed"
    status = int(answer.split(b" ", 2)[1])
    if status == 100:
        return "100"
    assert status in STATUSES, answer[:500]
    return str(status)


@dataclass(frozen=True)
class Target:
    """A server over an engine without a model, in a process of its own."""

    pid: int
    address: tuple[str, int]

    @property
    def rss_bytes(self) -> int:
        """Memory in use."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def hear_all(self, api: str, seeds: Iterable[int]) -> Counter[str]:
        """Have every conversation, and then a request that must be answered."""
        outcomes: Counter[str] = Counter()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for outcome in pool.map(lambda seed: self._hear(api, seed), seeds):
                outcomes[outcome] += 1
        connection = HTTPConnection(*self.address, timeout=_PATIENCE_S)
        connection.request("POST", "/v1/query", b'{"question": "?"}', {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
        connection.close()
        return outcomes

    def _hear(self, api: str, seed: int) -> str:
        said = conversation(api, seed)
        try:
            return hear(self.address, said)
        except Exception as error:
            raise AssertionError(f"{api} {seed}: {said.pieces[0][:300]!r}") from error


@contextmanager
def target() -> Iterator[Target]:
    """One that must still end as told when all is over."""
    command = (sys.executable, "-m", "tests.fuzzing.bodies_target")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("HTTP is served on "))
        port = line.rpartition(":")[2]
        yield Target(process.pid, ("127.0.0.1", int(port)))
        process.communicate("")
    assert process.returncode == 0
