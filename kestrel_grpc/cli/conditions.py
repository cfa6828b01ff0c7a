"""Describes the conditions of a report: the server with its device and options, as it reports them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kestrel_client import Client

_MAIN = ("max_batch_size", "kv_dtype", "text_backend", "vision_backend", "prefix_cache", "deterministic")
"""The settings that a line of text has room for."""


def server_facts(client: Client, model: str = "") -> dict[str, Any] | None:
    """Returns what the server says about itself, its devices and its options; None if it does not on this port.

    `model` selects one of several. Raises the errors of a client.
    """
    from kestrel_client import KestrelClientError

    try:
        info, models = client.server_info(), client.list_models()
    except KestrelClientError as error:
        if error.code.name != "UNIMPLEMENTED":
            raise
        return None  # its EngineService has a port of its own
    served = next((item for item in models if item.name == model), models[0])
    return _facts(
        info.server_version,
        {"model": served.name, "revision": served.revision, "architecture": served.architecture},
        served.dtype,
        [engine.device_name or engine.device for engine in info.engines],
        info.frontend_count,
        info.settings,
    )


def http_server_facts(said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same facts from the answer of `GET /v1/server`. Raises KeyError or TypeError for others."""
    return _facts(
        said["server_version"],
        {name: said[name] for name in ("model", "revision", "architecture")},
        said["dtype"],
        [engine["device_name"] or engine["device"] for engine in said["engines"]],
        said["frontend_count"],
        said["settings"],
    )


def _facts(
    version: str,
    model: Mapping[str, str],
    number_format: str,
    device_names: Sequence[str],
    num_frontends: int,
    settings: Mapping[str, str],
) -> dict[str, Any]:
    return {
        "version": version,
        **model,
        "number_format": number_format,
        "devices": [name if count == 1 else f"{count} × {name}" for name, count in Counter(device_names).items()],
        "front_ends": num_frontends,
        "settings": dict(settings),
    }


def server_line(facts: Mapping[str, Any]) -> str:
    """Returns the facts in one line: the model, the devices, and the options that matter most."""
    settings: Mapping[str, str] = facts["settings"]
    main = [f"{name} {settings[name]}" for name in _MAIN if name in settings]
    where = " and ".join(facts["devices"]) or "an unknown device"
    start = f"{facts['version']}, {facts['model']} in {facts['number_format']} on {where}"
    return "; ".join((start, *([", ".join(main)] if main else [])))


def flat_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns the facts as rows of a table: those of `settings` by the names of their options."""
    rows = {name: value for name, value in facts.items() if name != "settings" and value not in ("", [], {}, None)}
    rows |= facts.get("settings", {})
    return {name: _said(value) for name, value in rows.items()}


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{number:,} of {name}" for name, number in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)
