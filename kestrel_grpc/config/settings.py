"""Collects the texts of options from flags, the environment and a file, in this order of precedence.

Names the source of each text; `options.py` parses the texts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kestrel_runtime.api.errors import did_you_mean

ENVIRONMENT_PREFIX = "KESTREL_GRPC_"
FILE_OPTION = "config"
"""The option that names the file. It cannot stand in the file itself."""
REPLACED: Mapping[str, str] = MappingProxyType({"kv_fraction": "memory_utilization"})
"""Options that were removed, and those to use instead."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The text given for an option, and its source, for messages."""

    text: str
    source: str


def flag_name(name: str) -> str:
    """`max_queue` → `--max-queue`."""
    return "--" + name.replace("_", "-")


def environment_name(name: str) -> str:
    """`max_queue` → `KESTREL_GRPC_MAX_QUEUE`."""
    return ENVIRONMENT_PREFIX + name.upper()


def unknown_flag(name: str) -> str:
    """The message about a flag that is no option."""
    hint = f"; use {flag_name(REPLACED[name])}" if name in REPLACED else ""
    return f"{flag_name(name)}: is no option{hint}"


def collect(
    names: Collection[str],
    flags: Mapping[str, str | None],
    environment: Mapping[str, str],
    problems: list[str],
) -> dict[str, Setting]:
    """The settings by option. Adds what is wrong to `problems`."""
    settings: dict[str, Setting] = {}
    for name in names:
        variable = environment_name(name)
        if variable in environment:
            settings[name] = Setting(environment[variable], variable)
    for name in REPLACED:
        variable = environment_name(name)
        if variable in environment:
            problems.append(f"{variable}: is no variable of this server{meant(variable, ())}")
        if flags.get(name) is not None:
            problems.append(unknown_flag(name))
    for name in names:
        text = flags.get(name)
        if text is not None:
            settings[name] = Setting(text, flag_name(name))
    file = settings.get(FILE_OPTION)
    if file is not None:
        in_file = [name for name in names if name != FILE_OPTION]
        settings = {**dict(_read(Path(file.text), in_file, problems)), **settings}
    return settings


def _read(path: Path, names: Collection[str], problems: list[str]) -> Iterator[tuple[str, Setting]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
        return
    except ValueError as error:  # not UTF-8, or not TOML
        problems.append(f"{path}: {error}")
        return
    for key, value in table.items():
        source = f"{path}: {key}"
        text = _text(value)
        if key not in names:
            problems.append(f"{source}: is no option{meant(key, names)}")
        elif text is None:
            problems.append(f"{source}: must be a text, a number, true or false, or a list of texts")
        else:
            yield key, Setting(text, source)


def _text(value: Any) -> str | None:
    """A value as on the command line; None for a type that options do not have."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return None


def meant(word: str, words: Collection[str]) -> str:
    """The end of a message about an unknown word: what replaced it, or the word that is most like it."""
    replaced = {**REPLACED, **{environment_name(old): environment_name(new) for old, new in REPLACED.items()}}
    if word in replaced:
        return f"; use {replaced[word]}"
    return did_you_mean(word, words)
