"""Prints the value of every option and where it came from, as a file for `--config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kestrel_grpc.config.options import ServerConfig, options, settings_of
from kestrel_grpc.config.settings import FILE_OPTION


def effective_values(flags: Mapping[str, str | None], environment: Mapping[str, str]) -> str:
    """Every option as a line of the file, with where it came from. Raises `ConfigurationError` as parsing does."""
    config = ServerConfig.parse(flags, environment)
    settings = settings_of(flags, environment, [])
    lines: list[str] = []
    for name, option in options():
        value = getattr(config, name)
        line = f"{name} = {_toml(option.default_text if value is None else value)}"
        if value is None or name == FILE_OPTION:
            line = f"# {line}"
        source = settings[name].source if name in settings else "default"
        lines.append(f"{line:<47} # {source}")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    # JSON and TOML write strings, numbers and booleans in the same way.
    return json.dumps(value if isinstance(value, int | float) else str(value), ensure_ascii=False)
