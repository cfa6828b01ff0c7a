"""Finds and reads the files of an adapter: a folder under a configured root, or a repository of the hub.

Only safetensors and JSON files are read; nothing is executed. All bytes are read once, so that the checked bytes
are the loaded ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import stat
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from kestrel_runtime.api.adapters import (
    CHECKPOINT,
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    WEIGHTS_FILE,
    AdapterName,
)
from kestrel_runtime.api.errors import AdapterInvalid, AdapterNotFound

_MAX_ENTRIES = 1000
_MAX_FOLDERS = 10_000
"""The most folders that listing adapters visits."""
_MAX_DEPTH = 5
"""The most levels of folders: the four parts of a name, and the step of a training."""
_MAX_READINGS = 3
"""The most readings of a folder that is replaced while it is read."""
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of one adapter, in memory."""

    name: str
    config: Mapping[str, Any] | None
    """The parsed `adapter_config.json`; None where there is none."""
    tensors: Mapping[str, Tensor]
    """The tensors by name, on the host, with the types of the file."""
    digest: bytes
    """SHA-256 of all files."""


class _Replaced(AdapterInvalid):
    """The folder of the adapter has become another one while it was read; the new one may be good."""


class AdapterSource:
    """Finds and reads the files of adapters. For one thread at a time."""

    def __init__(
        self,
        root: Path | None,
        repositories: Collection[str],
        max_file_bytes: int,
        download: Callable[..., str] | None = None,
    ) -> None:
        """Takes the folder in which names are resolved, and repositories of the hub that requests may also name.

        `download` is called like `huggingface_hub.snapshot_download`, which is the default.
        """
        self._root = None if root is None else Path(os.path.realpath(root))
        self._repositories = frozenset(repositories)
        self._max_file_bytes = max_file_bytes
        self._download = download or _snapshot_download

    def read(self, text: str) -> AdapterFiles:
        """Returns the files of the adapter that a name stands for.

        Raises `AdapterNotFound` and `AdapterInvalid`.
        """
        name = AdapterName.parse(text)
        if name is None:
            raise AdapterNotFound(text)
        folder, allowed = self._find(name)
        for _ in range(_MAX_READINGS - 1):
            with contextlib.suppress(_Replaced):
                return self._read_folder(text, folder, allowed)
        return self._read_folder(text, folder, allowed)

    def read_upload(self, folder: str, name: str) -> AdapterFiles:
        """Returns the files of a folder of this name, in that of all adapters, that is to be the adapter `name`.

        Raises `AdapterInvalid`.
        """
        if self._root is None:
            raise AdapterInvalid(name, ("there is no folder of adapters",))
        return self._read_folder(name, self._root / folder, self._root)

    def _read_folder(self, name: str, folder: Path, allowed: Path) -> AdapterFiles:
        try:
            before = os.stat(folder)
            try:
                files = self._read(name, folder, allowed)
            except (OSError, AdapterInvalid):
                _require_same(name, folder, before)
                raise
            _require_same(name, folder, before)
        except OSError as error:
            raise AdapterInvalid(name, (f"cannot be read: {error.strerror}",)) from None
        return files

    def _find(self, name: AdapterName) -> tuple[Path, Path]:
        """Returns the folder of a name, and the folder in which its files must lie after symbolic links."""
        if self._root is not None:
            for relative in name.folders():
                folder = Path(os.path.realpath(self._root / relative))
                if folder != self._root and folder.is_relative_to(self._root) and folder.is_dir():
                    return folder, self._root
        if name.path in self._repositories:
            return self._fetch(name)
        raise AdapterNotFound(str(name))

    def names(self) -> list[str]:
        """Returns the names of folders with weights and of the listed repositories, in order, at most 1,000."""
        found = set(self._repositories)
        if self._root is not None:
            for relative in _adapter_folders(self._root):
                name = _name_of_folder(relative)
                if name is not None:
                    found.add(str(name))
        return sorted(found)[:_MAX_ENTRIES]

    def _fetch(self, name: AdapterName) -> tuple[Path, Path]:
        patterns = [CONFIG_FILE, "*.safetensors"]
        try:
            folder = Path(self._download(name.path, revision=name.step, allow_patterns=patterns))
        except OSError as error:  # the errors of the hub's library are among them
            raise AdapterInvalid(str(name), (f"cannot be downloaded: {type(error).__name__}",)) from error
        # In its cache the hub's library links the files of a revision to their contents, next to `snapshots`.
        return folder, Path(os.path.realpath(folder)).parents[1]

    def _read(self, name: str, folder: Path, allowed: Path) -> AdapterFiles:
        before = _listing(folder)
        weights = self._weights_name(name, before)
        config = None
        if CONFIG_FILE in before:
            config = self._read_file(name, folder / CONFIG_FILE, allowed, MAX_CONFIG_BYTES)
        data = self._read_file(name, folder / weights, allowed, self._max_file_bytes)
        if _listing(folder) != before:
            raise AdapterInvalid(name, ("the folder was changed while it was read",))
        digest = hashlib.sha256()
        for part in (config or b"", data):
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
        return AdapterFiles(name, _parsed(name, config), _tensors(name, weights, data), digest.digest())

    @staticmethod
    def _weights_name(name: str, listing: Collection[str]) -> str:
        if WEIGHTS_FILE in listing:
            return WEIGHTS_FILE
        found = sorted(item for item in listing if item.endswith(".safetensors"))
        if len(found) == 1:
            return found[0]
        if found:
            raise AdapterInvalid(name, (f"has several .safetensors files and no {WEIGHTS_FILE}",))
        pickled = sorted(item for item in listing if item.endswith(_PICKLES))
        hint = f"; {pickled[0][:64]} is not read, as pickled files can run code" if pickled else ""
        raise AdapterInvalid(name, (f"has no .safetensors file{hint}",))

    @staticmethod
    def _read_file(name: str, path: Path, allowed: Path, max_bytes: int) -> bytes:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            before = os.fstat(descriptor)
            # Check the opened file: its path may lead to another file a moment later.
            link = Path(f"/proc/self/fd/{descriptor}")
            target = Path(os.path.realpath(link if link.exists() else path))
            if not stat.S_ISREG(before.st_mode):
                raise AdapterInvalid(name, (f"{path.name}: is no regular file",))
            if not target.is_relative_to(allowed):
                raise AdapterInvalid(name, (f"{path.name}: leads out of the folder of adapters",))
            if before.st_size > max_bytes:
                raise AdapterInvalid(name, (f"{path.name}: has more than {max_bytes} bytes",))
            # One read returns the whole of most files. Joining blocks would hold the interpreter's lock while it
            # copies, and so block all other threads.
            blocks, num_left = list[bytes](), before.st_size + 1
            while num_left and (block := file.read(num_left)):
                blocks.append(block)
                num_left -= len(block)
            after = os.fstat(descriptor)
        if num_left != 1 or _identity(before) != _identity(after):
            raise AdapterInvalid(name, (f"{path.name}: was changed while it was read",))
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def _require_same(name: str, folder: Path, before: os.stat_result) -> None:
    if not os.path.samestat(before, os.stat(folder)):
        raise _Replaced(name, ("the folder was replaced while it was read",))


def _name_of_folder(relative: str) -> AdapterName | None:
    """Returns the name of a folder; for a trainer's folder of a step, the name with the step."""
    path, _, last = relative.rpartition("/")
    if path and last.startswith(CHECKPOINT):
        relative = f"{path}@{last.removeprefix(CHECKPOINT)}"
    return AdapterName.parse(relative)


def _adapter_folders(root: Path) -> Iterator[str]:
    """Yields the folders under `root` that hold a safetensors file, relative to it.

    Unreadable folders are left out.
    """
    folders = deque([""])
    for _ in range(_MAX_FOLDERS):
        if not folders:
            return
        relative = folders.popleft()
        has_weights = False
        try:
            with os.scandir(root / relative) as entries:
                for entry in itertools.islice(entries, _MAX_ENTRIES):
                    has_weights |= entry.name.endswith(".safetensors")
                    inner = f"{relative}/{entry.name}" if relative else entry.name
                    if inner.count("/") < _MAX_DEPTH and entry.is_dir() and _is_inside(root / inner, root):
                        folders.append(inner)
        except OSError:
            continue
        if has_weights and relative:
            yield relative


def _is_inside(folder: Path, root: Path) -> bool:
    return Path(os.path.realpath(folder)).is_relative_to(root)


def _listing(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the name and the identity of each entry of a folder."""
    found: dict[str, tuple[int, ...]] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if len(found) >= _MAX_ENTRIES:
                break
            found[entry.name] = _identity(entry.stat(follow_symlinks=False))
    return found


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _parsed(name: str, config: bytes | None) -> Mapping[str, Any] | None:
    if config is None:
        return None
    try:
        value = json.loads(config)
    except (ValueError, RecursionError):
        raise AdapterInvalid(name, (f"{CONFIG_FILE}: is not JSON",)) from None
    if not isinstance(value, dict):
        raise AdapterInvalid(name, (f"{CONFIG_FILE}: is no JSON object",))
    return value


def _tensors(name: str, file: str, data: bytes) -> Mapping[str, Tensor]:
    try:
        if not hasattr(os, "memfd_create"):
            return safetensors.torch.load(data)
        return _mapped(data)
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError, TypeError, OverflowError):
        raise AdapterInvalid(name, (f"{file[:64]}: is no safetensors file",)) from None


def _mapped(data: bytes) -> Mapping[str, Tensor]:
    """Returns the tensors of a safetensors file, mapped from a copy in memory that only they refer to.

    `safetensors.torch.load` would copy all of them in one call that holds the interpreter: for 73 MB no other
    thread runs for 42 ms.
    """
    descriptor = os.memfd_create("adapter")
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        with safetensors.safe_open(f"/proc/self/fd/{descriptor}", framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    finally:
        os.close(descriptor)


def _snapshot_download(repository: str, **options: Any) -> str:
    from huggingface_hub import snapshot_download  # it takes long to import, and many servers have no such adapters

    return snapshot_download(repository, **options)
