"""Collects the texts of options from flags, the environment and a file, in this order of precedence.

Names the source of each text; `options.py` parses the texts. Also finds environment variables that set no option:
unknown ones with our prefix, and former names. Variables that begin with `KESTREL_` alone belong to the engine of
the model's makers, which users run beside this server.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kestrel_runtime.api.errors import did_you_mean

ENVIRONMENT_PREFIX = "KESTREL_GRPC_"
FORMER_PREFIX = "KESTREL_"
"""The prefix of all options in earlier versions."""
FILE_OPTION = "config"
"""The option that names the file. It cannot stand in the file itself."""
REPLACED: Mapping[str, str] = MappingProxyType({"kv_fraction": "memory_utilization"})
"""Options that were removed, and those to use instead."""
CLIENT_VARIABLES = ("token", "tls_ca", "tls_client_certificate", "tls_client_key")
"""Read by the client commands, which may run in the same environment."""
_ADDRESS = "address"
"""Read by them too, and never had another name."""
# Options that decide who reaches the server, and what leaves it. A variable that was meant to set one of them and
# does not stops the start: the server would run with less protection than its operator believes.
_SECURITY = (
    "host",
    "http_hosts",
    "http_origins",
    "insecure_public",
    "unix_socket",
    "admin_port",
    "admin_host",
    "tls_certificate",
    "tls_key",
    "tls_client_ca",
    "tokens",
    "image_hosts",
    "reflection",
    "metrics_host",
    "trace_content",
)
# Two names that are at least this similar are taken for one name and its mistyped form.
_MISTYPED = 0.9


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
    names: Mapping[str, str],
    flags: Mapping[str, str | None],
    environment: Mapping[str, str],
    problems: list[str],
) -> dict[str, Setting]:
    """The settings by option. Adds what is wrong to `problems`.

    `names` maps every name that users may write to that of the option; of two that are given, the later one wins.
    """
    settings: dict[str, Setting] = {}
    for name, option in names.items():
        variable = environment_name(name)
        if variable in environment:
            settings[option] = Setting(environment[variable], variable)
    for name in REPLACED:
        variable = environment_name(name)
        if variable in environment:
            problems.append(f"{variable}: is no variable of this server{_meant(variable, ())}")
        if flags.get(name) is not None:
            problems.append(unknown_flag(name))
    for name, option in names.items():
        text = flags.get(name)
        if text is not None:
            settings[option] = Setting(text, flag_name(name))
    file = settings.get(FILE_OPTION)
    if file is not None:
        read = dict(_read(Path(file.text), [name for name in names if name != FILE_OPTION], problems))
        in_file = {option: read[name] for name, option in names.items() if name in read}
        settings = {**in_file, **settings}
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
            problems.append(f"{source}: is no option{_meant(key, names)}")
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


def _meant(word: str, words: Collection[str]) -> str:
    """The end of a message about an unknown word: what replaced it, or the word that is most like it."""
    replaced = {**REPLACED, **{environment_name(old): environment_name(new) for old, new in REPLACED.items()}}
    if word in replaced:
        return f"; use {replaced[word]}"
    return did_you_mean(word, words)


def security_problems(names: Iterable[str], environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that seems to mean an option of access: a former name, or a mistyped one."""
    yield from former_variables(_SECURITY, environment)
    for variable, line in _unknown_variables(names, environment):
        if _concerns_security(variable):
            yield line


def environment_warnings(names: Iterable[str], environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each other variable with our prefix that is neither an option nor read by a client command."""
    for variable, line in _unknown_variables(names, environment):
        if not _concerns_security(variable):
            yield line


def former_variables(names: Iterable[str], environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each of these options that is set by the variable's former name."""
    for name in names:
        former = FORMER_PREFIX + name.upper()
        if former in environment:
            yield f"{former}: is not read; its name is now {environment_name(name)}"


def _unknown_variables(names: Iterable[str], environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each unknown variable, and a line about it. `collect` reports those of replaced options."""
    known = {environment_name(name) for name in (*names, *CLIENT_VARIABLES, _ADDRESS)}
    replaced = {environment_name(name) for name in REPLACED}
    for variable in environment:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known | replaced:
            yield variable, f"{variable}: is no variable of this server{_meant(variable, known)}"


def _concerns_security(variable: str) -> bool:
    names = [environment_name(name) for name in _SECURITY]
    return bool(difflib.get_close_matches(variable, names, n=1, cutoff=_MISTYPED))
