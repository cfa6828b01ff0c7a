"""Prints the value of every option and where it came from, as a file for `--config`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kestrel_grpc.config.options import ServerConfig, options, settings_of
from kestrel_grpc.config.precision import PRECISIONS
from kestrel_grpc.config.settings import FILE_OPTION
from kestrel_runtime.api.config import EngineConfig

# Options that the engine calls otherwise.
_FIELDS: Mapping[str, str] = MappingProxyType({"kv_pages": "num_kv_pages", "max_crops": "max_tiles_per_step"})


def effective_values(
    flags: Mapping[str, str | None],
    environment: Mapping[str, str],
    defaults_of: Callable[[EngineConfig], Mapping[str, str]] = lambda config: {},
) -> str:
    """Every option as a line of the file, with where it came from. Raises `ConfigurationError` as parsing does.

    `defaults_of` returns the values that `auto` resolves to, by field of `EngineConfig`.
    """
    config = ServerConfig.parse(flags, environment)
    engine = config.engine_config()
    here = {**PRECISIONS[config.precision], **defaults_of(engine)}
    settings = settings_of(flags, environment, [])
    lines: list[str] = []
    for name, option in options():
        value = getattr(config, name)
        line = f"{name} = {_toml(option.default_text if value is None else value)}"
        if value is None or name == FILE_OPTION:
            line = f"# {line}"
        source = settings[name].source if name in settings else "default"
        found = here.get(_FIELDS.get(name, name))
        source += "" if found is None or value not in (None, "auto") else f"; here {found}"
        lines.append(f"{line:<47} # {source}")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    # JSON and TOML write strings, numbers and booleans in the same way.
    return json.dumps(value if isinstance(value, int | float) else str(value), ensure_ascii=False)
