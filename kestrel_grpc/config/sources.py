"""Collects the texts of options from flags, the environment and a file, in this order of precedence.

Names the source of each text; `options.py` parses the texts. Also finds environment variables that have our prefix
and set no option. Variables that begin with `KESTREL_` alone belong to the engine of the model's makers, which may
run on the same machine.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel_runtime.api.errors import did_you_mean

ENVIRONMENT_PREFIX = "KESTREL_GRPC_"
FILE_OPTION = "config"
"""The option that names the file. The file cannot contain it."""
CLIENT_VARIABLES = ("address", "token", "tls_ca", "tls_client_certificate", "tls_client_key")
"""The variables, without their prefix, that the client commands read. They may run in the same environment."""
# Options that decide who reaches the server, and what leaves it. A variable that was meant to set one of them and
# does not stops the start: the server would run with less protection than its operator believes.
ACCESS_OPTIONS = (
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
    """Holds the text given for an option, and its source for messages."""

    text: str
    source: str


def flag_name(name: str) -> str:
    """Returns the flag of an option: `max_queue` → `--max-queue`."""
    return "--" + name.replace("_", "-")


def environment_name(name: str) -> str:
    """Returns the variable of an option: `max_queue` → `KESTREL_GRPC_MAX_QUEUE`."""
    return ENVIRONMENT_PREFIX + name.upper()


def unknown_flag(name: str) -> str:
    """Returns the message about a flag that is no option."""
    return f"{flag_name(name)}: is no option"


def collect(
    names: Collection[str],
    flags: Mapping[str, str | None],
    environment: Mapping[str, str],
    problems: list[str],
) -> dict[str, Setting]:
    """Returns the settings by the name of the option. Adds mistakes to `problems`."""
    settings: dict[str, Setting] = {}
    for name in names:
        variable = environment_name(name)
        if variable in environment:
            settings[name] = Setting(environment[variable], variable)
        text = flags.get(name)
        if text is not None:
            settings[name] = Setting(text, flag_name(name))
    file = settings.get(FILE_OPTION)
    if file is not None:
        in_file = dict(_read(Path(file.text), [name for name in names if name != FILE_OPTION], problems))
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
            problems.append(f"{source}: is no option{did_you_mean(key, names)}")
        elif text is None:
            problems.append(f"{source}: must be a text, a number, true or false, or a list of texts")
        else:
            yield key, Setting(text, source)


def _text(value: Any) -> str | None:
    """Returns a value as on the command line; None for a type that no option has."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return None


def security_problems(names: Iterable[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each variable that seems to be the mistyped name of an option of access."""
    for variable, line in _unknown_variables(names, environment):
        if _concerns_security(variable):
            yield line


def environment_warnings(names: Iterable[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each other variable with our prefix that neither the server nor a client command reads."""
    for variable, line in _unknown_variables(names, environment):
        if not _concerns_security(variable):
            yield line


def _unknown_variables(names: Iterable[str], environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields each unknown variable, and a line about it."""
    known = {environment_name(name) for name in (*names, *CLIENT_VARIABLES)}
    for variable in environment:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known:
            yield variable, f"{variable}: is no variable of this server{did_you_mean(variable, known)}"


def _concerns_security(variable: str) -> bool:
    names = [environment_name(name) for name in ACCESS_OPTIONS]
    return bool(difflib.get_close_matches(variable, names, n=1, cutoff=_MISTYPED))
