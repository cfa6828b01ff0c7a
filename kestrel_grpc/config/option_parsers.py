"""How the texts of options become values. Each parser raises `ValueError` with what a text must be."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

_BYTES: Mapping[str | None, int] = MappingProxyType({None: 1, "K": 2**10, "M": 2**20, "G": 2**30})
_SECONDS: Mapping[str, float] = MappingProxyType({"s": 1.0, "m": 60.0, "h": 3600.0})


def whole_number(minimum: int, maximum: int = 2**31 - 1) -> Callable[[str], int]:
    """Parses an integer within bounds."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]+", text) or not minimum <= int(text) <= maximum:
            raise ValueError(f"must be a whole number from {minimum} to {maximum}")
        return int(text)

    return parse


def byte_count(minimum: int, maximum: int = 2**31 - 1) -> Callable[[str], int]:
    """Parses a number of bytes within bounds: `1048576`, `1024K`, `1M` or `1MiB`."""

    def parse(text: str) -> int:
        found = re.fullmatch(r"([0-9]+)(?:([KMG])(?:iB)?)?", text)
        value = -1 if found is None else int(found[1]) * _BYTES[found[2]]
        if not minimum <= value <= maximum:
            raise ValueError(
                f"must be a number of bytes from {minimum} to {maximum}, and may end in K, M or G (powers of 1024)"
            )
        return value

    return parse


def positive_seconds(text: str) -> float:
    """Parses a duration of zero or more seconds, at most a day: `90`, `90s` or `1.5m`."""
    number, factor = (text[:-1], _SECONDS[text[-1]]) if text[-1:] in _SECONDS else (text, 1.0)
    try:
        value = float(number) * factor
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 86_400.0:
        raise ValueError("must be a number of seconds from 0 to 86400, or one that ends in s, m or h")
    return value


def seconds_above_zero(text: str) -> float:
    """Parses a duration of more than zero seconds, at most a day."""
    value = positive_seconds(text)
    if value == 0.0:
        raise ValueError("must be above 0")
    return value


def one_of(*choices: str) -> Callable[[str], str]:
    """Parses one of a few words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def on_or_off(text: str) -> bool:
    """Parses a switch."""
    return one_of("on", "off")(text) == "on"


def name_prefix(text: str) -> str:
    """Parses what names of shared memory objects begin with, with or without the slash before them."""
    prefix = text.removeprefix("/")
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", prefix) is None:
        raise ValueError("must be letters, digits, dots, hyphens and underscores, beginning with a letter or digit")
    return prefix


def fraction(text: str) -> float:
    """Parses a fraction: above 0, at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise ValueError("must be a number above 0 and at most 1")
    return value


def parse_kernels(text: str) -> tuple[tuple[str, str], ...]:
    """Parses `operation=implementation`, several separated by commas."""
    pairs = [tuple(part.strip() for part in item.split("=")) for item in text.split(",")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise ValueError("must be operation=implementation, several separated by commas")
    return tuple((operation, implementation) for operation, implementation in pairs)


def some_text(text: str) -> str:
    """Parses any text that is not empty."""
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def names(text: str) -> tuple[str, ...]:
    """Parses names of hosts, separated by commas."""
    found = tuple(part.strip().lower() for part in text.split(","))
    if not all(re.fullmatch(r"[a-z0-9._-]+", name) for name in found):
        raise ValueError("must be names such as kestrel.example.com, separated by commas")
    return found


def origins(text: str) -> tuple[str, ...]:
    """Parses origins of web pages, separated by commas."""
    found = tuple(part.strip().lower() for part in text.split(","))
    if not all(re.fullmatch(r"https?://[a-z0-9._-]+(:[0-9]+)?", origin) for origin in found):
        raise ValueError("must be origins such as https://example.com, separated by commas")
    return found
