"""What an option of the server is: a field of a dataclass that knows its help text and how its text is parsed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any

_OPTION = "option"


@dataclass(frozen=True, slots=True)
class Option:
    """What is known about an option beside its name. `parse` raises `ValueError` with the reason."""

    help: str
    unit: str
    parse: Callable[[str], Any]
    default_text: str


def option_field(
    default: Any, parse: Callable[[str], Any], help: str, *, unit: str = "", default_text: str | None = None
) -> Any:
    """A field of a dataclass. Help and documentation show its default as `default_text` where that is given."""
    text = str(default) if default_text is None else default_text
    return field(default=default, metadata={_OPTION: Option(help, unit, parse, text)})


def option_of(item: Field[Any]) -> Option:
    """What `option_field` has noted in a field."""
    return item.metadata[_OPTION]
