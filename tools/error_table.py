"""Prints the table of docs/errors.md, generated from the errors of the code: `python -m tools.error_table`."""

from collections.abc import Mapping
from types import MappingProxyType

from kestrel_grpc.calls.errors import ERRORS, INTERNAL

# Replaces the first sentence of an error's docstring where that sentence says too much or too little for callers.
_WHEN: Mapping[str, str] = MappingProxyType(
    {
        "IMAGE_TOO_LARGE": "The image exceeds a limit of its size.",
        "IMAGE_DECODE_FAILED": "The image does not decode.",
        "DRAINING": "The server is ending and takes no new requests.",
        "RECOVERING": "The engine restarts after a failure.",
        "ENGINE_UNAVAILABLE": (
            "The engine takes no requests: it is starting, draining, closed, or died. Or the supervisor of several "
            "processes does not answer."
        ),
        "STREAM_IDLE": "The caller has read no message of a stream for too long, or sent no frame.",
        "STREAM_EXPIRED": "A stream of frames has lasted as long as one may; the client opens another one.",
        "METHOD_NOT_ALLOWED": "The path supports other HTTP verbs only.",
        "INTERNAL": "A fault of the server; its log has the id of the request.",
    }
)


def markdown_table() -> str:
    """Returns the table of reasons as Markdown."""
    rows = ["| Reason | gRPC status | HTTP status | When |", "|---|---|---|---|"]
    seen: set[str] = set()
    for row in (*ERRORS, INTERNAL):
        if row.reason not in seen:
            seen.add(row.reason)
            sentence, _, _ = " ".join((row.error.__doc__ or "").split()).partition(". ")
            when = _WHEN.get(row.reason, f"{sentence.partition('; ')[0].rstrip('.')}.")
            rows.append(f"| `{row.reason}` | {row.code.name} | {row.http_status} | {when} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown_table())
