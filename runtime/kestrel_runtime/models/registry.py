"""Finds the family of a checkpoint. A family is not imported before a checkpoint of it is loaded.

`model_type` in a checkpoint's `config.json` names its family. A name is looked up in `FAMILIES`, then among the
entry points that installed packages declare in the group `kestrel_runtime.models`. Some published
checkpoints of Moondream lack the key, have values such as "moondream1", or have no `config.json`. A checkpoint that
names no other family is therefore loaded as a Moondream, which refuses weights of other models.
"""

from __future__ import annotations

import importlib
import reprlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.loading.checkpoint import Checkpoint, find_checkpoint, is_local
from kestrel_runtime.models.family import ModelFamily

FAMILIES: Mapping[str, str] = MappingProxyType({"moondream": "kestrel_runtime.models.moondream.family:FAMILY"})
"""Name → module:attribute of the families that come with the engine."""
ENTRY_POINTS = "kestrel_runtime.models"
_DEFAULT = "moondream"


def family_of(checkpoint: Checkpoint) -> ModelFamily:
    """Returns the family of the checkpoint. Raises `CheckpointError` if it cannot be imported."""
    name = (checkpoint.config or {}).get("model_type")
    if name is not None and not isinstance(name, str):
        raise CheckpointError(f"{checkpoint.name}: config.json: model_type is {reprlib.repr(name)}, not a name")
    address = None if name is None else _address(name)
    if address is None:
        name, address = _DEFAULT, FAMILIES[_DEFAULT]
    module, _, attribute = address.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"the model family {name} cannot be imported from {address}: {error}") from error


def check_local_checkpoint(model: str, revision: str | None) -> None:
    """Raises `CheckpointError` if a local path is no checkpoint, or has a configuration that cannot be served.

    It is fast, since it imports no torch and reads no weights. Other names are not checked.
    """
    if is_local(model):
        checkpoint = find_checkpoint(model, revision)
        family_of(checkpoint).check_config(checkpoint)


def _address(name: str) -> str | None:
    if name in FAMILIES:
        return FAMILIES[name]
    # This reads a file of every installed package.
    installed = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    return installed.get(name)
