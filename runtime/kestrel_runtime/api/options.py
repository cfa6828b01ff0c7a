"""Describes options: fields of a dataclass that operators set as text, each with its range, unit and help.

`EngineConfig` and the server's configuration are such dataclasses. Flags, environment variables, the configuration
file and the documentation follow from the descriptions. A parser raises `ValueError` whose message says what the
text must be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

_BYTES: Mapping[str | None, int] = MappingProxyType({None: 1, "K": 2**10, "M": 2**20, "G": 2**30})
_SECONDS: Mapping[str, float] = MappingProxyType({"s": 1.0, "m": 60.0, "h": 3600.0})
_OPTION = "option"


class ByDevice(NamedTuple):
    """The values that an unset option takes on each kind of device."""

    cuda: Any
    cpu: Any
    shrinks: bool = False
    """True if the value for CUDA is divided on a GPU with little memory."""


@dataclass(frozen=True, slots=True)
class Option:
    """The description of an option. `parse` raises `ValueError` with the reason."""

    name: str
    """The name in the configuration file; the flag of `max_queue` is `--max-queue`."""
    help: str
    unit: str
    parse: Callable[[str], Any]
    default_text: str
    by_device: ByDevice | None
    """The values of an unset option, if they depend on the device; else None."""


def option(
    default: Any,
    parse: Callable[[str], Any],
    help: str,
    *,
    unit: str = "",
    default_text: str | None = None,
    name: str = "",
    by_device: ByDevice | None = None,
) -> Any:
    """Returns a field of a dataclass. `name` is the option's name if the field has another one.

    Help and documentation show its default as `default_text`, or as `by_device`, if these are given.
    """
    if default_text is None:
        default_text = shown(default) if by_device is None else _device_text(default, by_device)
    return field(default=default, metadata={_OPTION: Option(name, help, unit, parse, default_text, by_device)})


def options_of(kind: Any) -> Iterator[tuple[str, Option]]:
    """Yields the options of a dataclass, each with the name of its field."""
    for item in fields(kind):
        found: Option | None = item.metadata.get(_OPTION)
        if found is not None:
            yield item.name, found if found.name else replace(found, name=item.name)


def shown(value: Any) -> str:
    """Returns a value as help and documentation show it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _device_text(default: Any, values: ByDevice) -> str:
    less = ", less where it has little memory" if values.shrinks else ""
    text = f"{shown(values.cuda)} on a GPU{less}, else {shown(values.cpu)}"
    return text if default is None else f"{default}: {text}"


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


def fraction(text: str) -> float:
    """Parses a fraction: above 0, at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise ValueError("must be a number above 0 and at most 1")
    return value


def some_text(text: str) -> str:
    """Parses any text that is not empty."""
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def names(text: str) -> tuple[str, ...]:
    """Parses names, such as those of hosts, separated by commas."""
    found = tuple(part.strip().lower() for part in text.split(","))
    if not all(re.fullmatch(r"[a-z0-9._-]+", name) for name in found):
        raise ValueError("must be names such as kestrel.example.com, separated by commas")
    return found


def repositories(text: str) -> tuple[str, ...]:
    """Parses repositories of the hub, separated by commas."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(re.fullmatch(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+", name) for name in found):
        raise ValueError("must be repositories such as org/name, separated by commas")
    return found


def parse_kernels(text: str) -> tuple[tuple[str, str], ...]:
    """Parses `operation=implementation`, several separated by commas."""
    pairs = [tuple(part.strip() for part in item.split("=")) for item in text.split(",")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise ValueError("must be operation=implementation, several separated by commas")
    return tuple((operation, implementation) for operation, implementation in pairs)
