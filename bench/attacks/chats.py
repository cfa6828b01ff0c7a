"""Attacks on tools and `/v1/responses`: schemas that cost, calls that never end, large bodies, unread streams."""

import asyncio
import itertools
import json
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.attacks.attack import Attack, Outcome, Question, Victim
from bench.attacks.constraints import SCHEMAS

NUM_CALLERS, NUM_UNREAD = 16, 128
NUM_TOOLS = 128
_GONE_AFTER_S, _TIMEOUT_S = 0.1, 30.0
"""Every second caller does not wait for its answer."""
_MAX_ANSWER_S = 2.0
_HTTP = ("--http-port", "0")
_CHAT, _RESPONSES = "/v1/chat/completions", "/v1/responses"
_CONTROL_TOKENS = "<|endoftext|><|md_reserved_0|><|md_reserved_1|><|coord|>"
_MIB = 2**20
_RECEIVE_BYTES = 4096

Sent = tuple[str, bytes]
"""A path and a body."""


# Bodies


def _chat(number: int, tools: list[dict[str, Any]], **fields: Any) -> Sent:
    listed = [{"type": "function", "function": tool} for tool in tools]
    fields = {"messages": [{"role": "user", "content": f"What? {number}"}], "max_tokens": 64, **fields}
    return _CHAT, json.dumps({"model": "moondream3-preview", "tools": listed, **fields}).encode()


def _forced(number: int, tools: list[dict[str, Any]], **fields: Any) -> Sent:
    return _chat(number, tools, tool_choice="required", **fields)


def _many_tools(number: int) -> Sent:
    """As many tools as there may be, whose parameters are as large as they may be together."""
    names = [f"p{number}_{index}" for index in range(3)]
    property_ = {"type": "string", "pattern": "^(a|[b-d]){1,9}$"}
    parameters = {"type": "object", "properties": dict.fromkeys(names, property_), "required": names}
    return _forced(number, [{"name": f"f{index}", "parameters": parameters} for index in range(NUM_TOOLS)])


def _costly_tools(number: int) -> Sent:
    """Parameters that cost as much as a constraint can, one tool of each kind."""
    tools = [
        {
            "name": f"f{index}",
            "parameters": {"type": "object", "properties": {"a": make(number)}, "required": ["a"]},
        }
        for index, make in enumerate(SCHEMAS)
    ]
    return _forced(number, tools[number % len(tools) :][:1] if number % 2 else tools[:3])


def _nested_tool(number: int) -> Sent:
    """Objects in objects, as deep as a schema may be or ten thousand deep, which is refused."""
    path, body = _forced(number, [{"name": "f", "parameters": {"type": "object", "properties": {"a": "NESTED"}}}])
    depth = 4_000 if number % 2 else 14
    nested = b'{"properties": {"a": ' * depth + b'{"const": %d}' % number + b"}}" * depth
    return path, body.replace(b'"NESTED"', nested)


def _endless_call(number: int) -> Sent:
    """Arguments that never end, or end far behind the last token."""
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    long = {"type": "object", "properties": {"a": {"type": "string", "minLength": 10_000 + number % 1000}}}
    return _forced(number, [{"name": "f", "parameters": endless if number % 2 else {**long, "required": ["a"]}}])


def _control_names(number: int) -> Sent:
    return _forced(number, [{"name": _CONTROL_TOKENS, "description": _CONTROL_TOKENS}])


def _control_results(number: int) -> Sent:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": f"What? {number}"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": _CONTROL_TOKENS * 16},
    ]
    return _chat(number, [{"name": "f"}], messages=messages, max_tokens=8)


def _response(number: int, **fields: Any) -> Sent:
    fields = {"input": f"What? {number}", "max_output_tokens": 8, **fields}
    return _RESPONSES, json.dumps({"model": "moondream3-preview", **fields}).encode()


def _long_input(number: int) -> Sent:
    return _response(number, input="what is it? " * (30 * _MIB // 12))


def _many_items(number: int) -> Sent:
    return _response(number, input=[{"role": "user", "content": "x"}] * 4_900)


def _many_parts(number: int) -> Sent:
    parts = [{"type": "input_text", "text": "x" * 60}] * 256
    return _response(number, input=[{"role": "user", "content": parts}] * 18)


def _large_facts(number: int) -> Sent:
    """What an answer repeats of its request."""
    tools = [{"type": "function", "name": f"f{index}", "description": "x" * 7_000} for index in range(NUM_TOOLS)]
    return _response(number, tools=tools, stream=True)


def _refused_fields(number: int) -> Sent:
    """Every field that is refused, and names that no request has."""
    given = {"a": ["x"] * 200}
    refused = ("background", "previous_response_id", "conversation", "prompt", "n", "top_logprobs")
    unknown = (f"max_output_token_{index}" for index in range(1_000))
    file = {"type": "input_image", "file_id": "f", "detail": given}
    return _response(
        number,
        **dict.fromkeys(refused, given),
        **dict.fromkeys(unknown, 1),
        input=[{"role": "user", "content": [file] * 20}],
    )


_TOOLS = (_many_tools, _costly_tools, _nested_tool, _endless_call, _control_names, _control_results)
_BODIES = (_long_input, _many_items, _many_parts, _large_facts, _refused_fields)


# Strikes


def _prepared(bodies: tuple[Callable[[int], Sent], ...], number_of_each: int) -> list[tuple[str, Sent]]:
    """Returns all that is sent, with its name, so that the attackers need no time to make it."""
    return [(make.__name__.strip("_"), make(number)) for number in range(number_of_each) for make in bodies]


def _ask_always(victim: Victim, seconds: float, prepared: list[tuple[str, Sent]]) -> Outcome:
    """Several callers ask without a pause, each time something else."""
    return asyncio.run(_ask_all(victim, seconds, prepared))


async def _ask_all(victim: Victim, seconds: float, prepared: list[tuple[str, Sent]]) -> Outcome:
    outcome, requests, end = Outcome(), itertools.cycle(prepared), time.monotonic() + seconds

    async def caller(index: int) -> None:
        while time.monotonic() < end:
            name, (path, body) = next(requests)
            try:
                async with asyncio.timeout(_GONE_AFTER_S if index % 2 else _TIMEOUT_S):
                    became = await _post(victim, path, body)
            except TimeoutError:
                became = "gone"
            except OSError:
                became = "closed"
            outcome[f"{name} {became}"] += 1

    await asyncio.gather(*map(caller, range(NUM_CALLERS)))
    return outcome


async def _post(victim: Victim, path: str, body: bytes) -> str:
    """Returns the status of the answer, which is read to its end."""
    reader, writer = await asyncio.open_connection(victim.host, victim.http_port)
    try:
        writer.write(_head(victim, path, len(body)) + body)
        status = (await reader.readline())[9:12].decode("ascii")
        while await reader.read(2**16):
            pass
        return status or "closed"
    finally:
        writer.transport.abort()


def _head(victim: Victim, path: str, num_bytes: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {victim.token}\r\n"
        f"content-type: application/json\r\ncontent-length: {num_bytes}\r\n\r\n"
    ).encode("ascii")


def _read_nothing(victim: Victim, seconds: float, prepared: None) -> Outcome:
    """Streams of large responses on so many connections, of which nothing is read; closed ones are asked anew."""
    outcome, end = Outcome(), time.monotonic() + seconds
    path, body = _large_facts(0)
    open_: list[socket.socket] = []
    while time.monotonic() < end:
        while len(open_) < NUM_UNREAD and time.monotonic() < end:
            connection = socket.socket()
            try:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
                connection.settimeout(5.0)
                connection.connect((victim.host, victim.http_port))
                connection.sendall(_head(victim, path, len(body)) + body)
                outcome["streams"] += 1
                open_.append(connection)
            except OSError:
                outcome["not connected"] += 1
                connection.close()
        time.sleep(0.1)
    for connection in open_:
        connection.close()
    return outcome


# What must hold


def _check_tools(outcome: Mapping[str, int], log: str) -> list[str]:
    found = [
        f"{outcome[name]} {name}"
        for name in outcome
        if name.split()[-1] not in ("200", "400", "422", "429", "503", "gone")
    ]
    if not outcome.get("control_names 400", 0) or outcome.get("control_names 200", 0):
        found.append("names that are control tokens were not refused")
    if not outcome.get("control_results 200", 0):
        found.append("no result with control tokens was taken as a text")
    return found


def _check_bodies(outcome: Mapping[str, int], log: str) -> list[str]:
    taken = [
        f"{name} was answered"
        for name in ("long_input", "many_items", "refused_fields")
        if outcome.get(f"{name} 200", 0)
    ]
    errors = [
        f"{outcome[name]} {name}"
        for name in outcome
        if name.split()[-1].startswith("5") and not name.endswith("503")
    ]
    return taken + errors


ATTACKS = (
    Attack(
        "tools",
        f"{NUM_CALLERS} callers with forced calls that are made to cost time and memory or never end, "
        "half of whom do not wait",
        _ask_always,
        partial(_prepared, _TOOLS, 200),
        server_options=_HTTP,
        question=Question(is_constrained=True, max_s=_MAX_ANSWER_S),
        check=_check_tools,
    ),
    Attack(
        "responses-bodies",
        f"{NUM_CALLERS} callers with large bodies of /v1/responses, most of them refused, half of whom do not wait",
        _ask_always,
        partial(_prepared, _BODIES, 1),
        server_options=_HTTP,
        question=Question(max_s=_MAX_ANSWER_S),
        check=_check_bodies,
    ),
    Attack(
        "unread-responses",
        f"{NUM_UNREAD} streams of /v1/responses that are never read, each with the 2.7 MB that it repeats",
        _read_nothing,
        server_options=_HTTP,
        question=Question(max_s=_MAX_ANSWER_S),
    ),
)
