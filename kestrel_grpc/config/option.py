"""Options of the server: fields of a dataclass, each with a help text and a parser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any

_OPTION = "option"


@dataclass(frozen=True, slots=True)
class Option:
    """The facts about an option besides its name. `parse` raises `ValueError` with the reason."""

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
    """The `Option` that `option_field` stored in a field."""
    return item.metadata[_OPTION]
