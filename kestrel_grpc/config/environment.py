"""Finds environment variables that set no option: unknown ones with our prefix, and former names.

Variables that begin with `KESTREL_` alone belong to the model makers' engine, which users run beside this server.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping

from kestrel_grpc.config.settings import ENVIRONMENT_PREFIX, REPLACED, environment_name, meant

FORMER_PREFIX = "KESTREL_"
"""The prefix of all options in earlier versions."""
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


def security_problems(options: Iterable[str], environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that seems to mean an option of access: a former name, or a mistyped one."""
    yield from former_names(_SECURITY, environment)
    for variable, line in _unknown_variables(options, environment):
        if _concerns_security(variable):
            yield line


def environment_warnings(options: Iterable[str], environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each other variable with our prefix that is neither an option nor read by a client command."""
    for variable, line in _unknown_variables(options, environment):
        if not _concerns_security(variable):
            yield line


def former_names(names: Iterable[str], environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each of these options that is set by the variable's former name."""
    for name in names:
        former = FORMER_PREFIX + name.upper()
        if former in environment:
            yield f"{former}: is not read; its name is now {environment_name(name)}"


def _unknown_variables(options: Iterable[str], environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each unknown variable, and a line about it. `collect` reports those of replaced options."""
    known: Collection[str] = {environment_name(name) for name in (*options, *CLIENT_VARIABLES, _ADDRESS)}
    replaced = {environment_name(name) for name in REPLACED}
    for variable in environment:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known | replaced:
            yield variable, f"{variable}: is no variable of this server{meant(variable, known)}"


def _concerns_security(variable: str) -> bool:
    names = [environment_name(name) for name in _SECURITY]
    return bool(difflib.get_close_matches(variable, names, n=1, cutoff=_MISTYPED))
