"""Finds a checkpoint: a local folder or file, or a repository of the hub, downloaded into its cache.

Weights are not opened here.
"""

from __future__ import annotations

import json
import logging
import os
import re
import reprlib
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec

from kestrel_runtime.api.config import BUILT_IN_MODEL
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.loading.tokenizer import MAX_TOKEN_ID

_log = logging.getLogger(__name__)

_MOONDREAM_2 = "vikhyatk/moondream2"
_RELEASE = "2025-06-21"
# Short name → repository and the revision that its name selects (None: the newest). Only Moondream 2 tags its
# releases.
PUBLISHED_REPOSITORIES: Mapping[str, tuple[str, str | None]] = {
    "moondream2": (_MOONDREAM_2, _RELEASE),
    "moondream3-preview": ("moondream/moondream3-preview", None),
    "moondream3.1-9B-A2B": ("moondream/moondream3.1-9B-A2B", None),
}
TOKENIZER_REPOSITORY = "moondream/starmie-v1"

_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_INDEX = "model.safetensors.index.json"
_CODE = "config.py"
"""Names the publisher's code, which is read for the ids of the tokenizer, and never run."""
_MAX_JSON_BYTES, _MAX_TOKENIZER_BYTES = 2**24, 2**27
# In order of preference. "model" comes before other names: folders also hold expected answers or adapters.
_WEIGHT_PATTERNS = ("model.safetensors", "model*.safetensors", "model*.pt", "*.safetensors", "*.pt")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_END_OF_TEXT = "<|endoftext|>"
_PUBLISHED_ID = 0
"""The id of `_END_OF_TEXT` in `TOKENIZER_REPOSITORY`."""
# Releases of Moondream 2 are named after their days. Those before this one use another tokenizer and other prompts.
_FIRST_WITH_TOKENIZER = "2025-06-19"
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_BEGIN_ID = re.compile(r"\bbos_id\s*:\s*int\s*=\s*(\d{1,9})", re.ASCII)
_OTHER_FORMATS = (".bin", ".pth", ".ckpt", ".gguf", ".gz", ".onnx", ".npz")
_MAX_ECHO_CHARS = 200


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of one model. `revision` is the commit that a hub name resolved to, None for local files."""

    name: str
    revision: str | None
    weight_files: tuple[Path, ...]
    config: Mapping[str, Any] | None
    tokenizer_file: Path


def find_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Finds the checkpoint of `model`, and downloads it if it is on the hub.

    `model` is a folder, a .safetensors or .pt file, the built-in model, a published name or org/repo. A local path
    takes precedence over a hub name. Raises `CheckpointError` if it cannot be found or downloaded.
    """
    path = _existing(model)
    if path is not None:
        if revision is not None:
            raise CheckpointError(f"{model} is a local path: a revision goes with a hub name only")
        return _local_checkpoint(path)
    if model == BUILT_IN_MODEL:
        if revision is not None:
            raise CheckpointError(f"{model} is the built-in model, which has no revisions: leave out --revision")
        return replace(_local_checkpoint(Path(__file__).parents[1] / "nano"), name=BUILT_IN_MODEL)
    repository, pinned = repository_of(model)
    if not _HUB_NAME.fullmatch(repository):
        known = ", ".join((BUILT_IN_MODEL, *PUBLISHED_REPOSITORIES))
        shown = repr(model[:_MAX_ECHO_CHARS])
        raise CheckpointError(f"no file or folder {shown}, and no hub name either ({known}, or org/repo)")
    return _hub_checkpoint(model, repository, revision or pinned)


def is_local(model: str) -> bool:
    """Returns True if `find_checkpoint` takes a name for a path of this machine."""
    return _existing(model) is not None


def _existing(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # a name that no file has, or the home of no user
        return None


def repository_of(model: str) -> tuple[str, str | None]:
    """Returns the repository of a published name or org/repo, and the revision that the name selects."""
    return PUBLISHED_REPOSITORIES.get(model, (model, None))


def _local_checkpoint(path: Path) -> Checkpoint:
    if path.is_dir():
        folder, name = path, path.resolve().name
        try:
            names = [entry.name for entry in folder.iterdir()]
        except OSError as error:
            raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
        weight_names = _weight_names(folder, names)
    elif path.suffix in (".safetensors", ".pt"):
        folder, weight_names = path.parent, [path.name]
        name = path.resolve().parent.name if path.stem == "model" else path.stem
    else:
        raise CheckpointError(f"{path} is neither a folder nor a .safetensors or .pt file")
    return _checkpoint(name, None, folder, weight_names)


def _hub_checkpoint(name: str, repository: str, revision: str | None) -> Checkpoint:
    folder = _download(repository, revision, (_CONFIG, _TOKENIZER, _INDEX, _CODE))
    commit = folder.name  # the cache names a snapshot's folder after its commit
    weight_names = _weight_names(folder, _file_names(repository, commit, folder))
    if not all((folder / weight).exists() for weight in weight_names):
        folder = _download(repository, commit, weight_names)
    _log.info("%s is %s at commit %s", name, repository, commit)
    release = revision if repository == _MOONDREAM_2 and _DAY.fullmatch(revision or "") else None
    return _checkpoint(name, commit, folder, weight_names, release)


def _checkpoint(
    name: str, revision: str | None, folder: Path, weight_names: Sequence[str], release: str | None = None
) -> Checkpoint:
    """Checks and returns the checkpoint; `release` is the day of a release of Moondream 2, where it is known."""
    missing = [weight for weight in weight_names if not (folder / weight).exists()]
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}")
    odd = [weight for weight in weight_names if not (folder / weight).is_file()]
    if odd:
        raise CheckpointError(f"{folder / odd[0]} is no regular file")
    config = _read_json(folder / _CONFIG) if os.path.lexists(folder / _CONFIG) else None
    return Checkpoint(
        name=name,
        revision=revision,
        weight_files=tuple(folder / weight for weight in weight_names),
        config=config,
        tokenizer_file=_find_tokenizer(folder, config, release),
    )


def _weight_names(folder: Path, names: Collection[str]) -> list[str]:
    # `names` may include files that are not downloaded to `folder` yet. Only the index is opened.
    if _INDEX in names:
        return _shard_names(folder / _INDEX)
    for pattern in _WEIGHT_PATTERNS:
        found = sorted(name for name in names if fnmatch(name, pattern))
        if len(found) > 1:
            raise CheckpointError(
                f"{folder} holds {', '.join(found)} and no {_INDEX}: give the path of the one to load"
            )
        if found:
            return found
    other = sorted(name for name in names if name.endswith(_OTHER_FORMATS))
    hint = f"; {other[0][:_MAX_ECHO_CHARS]} is of a format that is not read: write .safetensors" if other else ""
    raise CheckpointError(f"{folder} holds no weights: no {_INDEX}, no .safetensors and no .pt file{hint}")


def _shard_names(index: Path) -> list[str]:
    shard_of = _read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{index} has no weight_map")
    # Shards are in the folder of their index. Other names could reach out of the folder or match other files.
    odd = [
        name
        for name in shard_of.values()
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name)
    ]
    if odd:
        shown = repr(odd[0])[:_MAX_ECHO_CHARS]
        raise CheckpointError(f"{index} names shards that are no .safetensors files next to it: {shown}")
    return sorted(set(shard_of.values()))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(file, _MAX_JSON_BYTES))
    except ValueError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    except RecursionError:
        raise CheckpointError(f"cannot read {file}: its lists and objects are nested too deeply") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return value


def _read(file: Path, max_bytes: int) -> bytes:
    """Returns the bytes of a regular file. A pipe or a device in its place is refused, and not waited for."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as opened:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{file} is no regular file")
            if status.st_size > max_bytes:
                raise CheckpointError(f"{file} has {status.st_size} bytes, more than {max_bytes}")
            return opened.read(max_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error


def _find_tokenizer(folder: Path, config: Mapping[str, Any] | None, release: str | None) -> Path:
    file = folder / _TOKENIZER
    given = _section(config, "tokenizer") or _section(_section(config, "config"), "tokenizer")
    expected_id = given.get("eos_id", 0)
    if type(expected_id) is not int or not 0 <= expected_id <= MAX_TOKEN_ID:
        shown = reprlib.repr(expected_id)
        raise CheckpointError(f"{folder / _CONFIG}: tokenizer.eos_id is {shown}, and no id of a token")
    # config.json decides. If it says nothing, prompts would be those of the current tokenizer.
    is_current = "eos_id" in given or _uses_current_tokenizer(folder, release)
    if is_current is False:
        raise CheckpointError(f"{folder}: {_former_release(folder, release)}")
    reason = f"{folder} has no {_TOKENIZER}"
    if os.path.lexists(file):
        found_id = _end_of_text_id(file)
        if found_id in (None, expected_id):
            return file
        reason = f"{file} puts {_END_OF_TEXT} at id {found_id}, the model at {expected_id}"
        if is_current is None:
            raise CheckpointError(
                f"{file} is not the tokenizer of releases since {_FIRST_WITH_TOKENIZER}, and nothing near it says "
                f"which one the weights were trained with: for weights of such a release put {_TOKENIZER} of "
                f"{TOKENIZER_REPOSITORY} there; earlier ones are not served, use {_MOONDREAM_2} at {_RELEASE}"
            )
    if expected_id != _PUBLISHED_ID:
        raise CheckpointError(f"{reason}; that of {TOKENIZER_REPOSITORY} puts it at {_PUBLISHED_ID}")
    if os.path.lexists(file):
        # The published Moondream 2 includes the tokenizer of earlier releases, which its own code does not use.
        _log.warning("%s; using the one of %s", reason, TOKENIZER_REPOSITORY)
    try:
        file = _download(TOKENIZER_REPOSITORY, None, (_TOKENIZER,)) / _TOKENIZER
    except CheckpointError as error:
        raise CheckpointError(f"{reason}, and {error}") from error
    if not file.is_file():
        raise CheckpointError(f"{reason}, and {TOKENIZER_REPOSITORY} has none either")
    return file


def _uses_current_tokenizer(folder: Path, release: str | None) -> bool | None:
    """Returns True if a checkpoint uses the tokenizer of `TOKENIZER_REPOSITORY`; None if its files do not say."""
    if os.path.lexists(folder / _CODE):
        found = _BEGIN_ID.search(_read(folder / _CODE, _MAX_JSON_BYTES).decode(errors="replace"))
        if found is not None:
            return int(found[1]) == 0
    return None if release is None else release >= _FIRST_WITH_TOKENIZER


def _former_release(folder: Path, release: str | None) -> str:
    source = f"{_CODE} there says so" if os.path.lexists(folder / _CODE) else f"release {release}"
    return (
        f"Moondream 2 before {_FIRST_WITH_TOKENIZER} has another tokenizer and other prompts, which are not served "
        f"({source}): use {_MOONDREAM_2} at {_RELEASE}"
    )


class _Model(msgspec.Struct):
    vocab: Any = None


class _TokenizerFile(msgspec.Struct):
    """The parts that say where the end of a text is. The others, which are most of the file, are not converted."""

    model: _Model = msgspec.field(default_factory=_Model)
    added_tokens: Any = None


def _end_of_text_id(tokenizer: Path) -> int | None:
    content = _read(tokenizer, _MAX_TOKENIZER_BYTES)
    try:
        data = msgspec.json.decode(content, type=_TokenizerFile)
        ids = dict(data.model.vocab or {})
        ids.update({token["content"]: token["id"] for token in data.added_tokens or []})
        return ids.get(_END_OF_TEXT)
    except (TypeError, KeyError, msgspec.ValidationError):
        raise CheckpointError(f"{tokenizer}: cannot be read as a tokenizer with byte-level BPE") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {tokenizer}: {error}") from error


def _section(data: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    value = (data or {}).get(key)
    return value if isinstance(value, Mapping) else {}


def _download(repository: str, revision: str | None, names: Sequence[str]) -> Path:
    from kestrel_runtime.loading.hub import download

    return download(repository, revision, names)


def _file_names(repository: str, commit: str, folder: Path) -> list[str]:
    from kestrel_runtime.loading.hub import file_names

    on_disk = [entry.name for entry in folder.iterdir()]
    if _INDEX in on_disk:
        return on_disk
    try:
        return file_names(repository, commit)
    except CheckpointError:  # offline: only the files in the cache are known
        return on_disk
