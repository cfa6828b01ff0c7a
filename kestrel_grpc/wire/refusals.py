"""Refusals of calls before their request is looked at: where they come from, and the form of their message."""

from __future__ import annotations


class SourceNotAllowed(Exception):
    """The call was made for another host, or by a page of another site. `header` names what tells so."""

    def __init__(self, header: str, value: str) -> None:
        super().__init__(header, value)
        self.header = header
        self.value = value


class MessageTooLarge(Exception):
    """The message of a call has more than `limit_bytes` bytes."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.limit_bytes = limit_bytes


class MediaTypeUnsupported(Exception):
    """The message is not of the type that the method takes, or is compressed; `expected` says what it must be."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected


class MethodUnknown(Exception):
    """No method has this name. `allowed` lists the verbs that the path takes instead; empty where there is none."""

    def __init__(self, name: str, allowed: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self.name = name
        self.allowed = allowed
