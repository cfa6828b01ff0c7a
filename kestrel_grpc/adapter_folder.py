"""Adds uploaded adapters to the folder of adapters, and removes adapters from it.

An upload is written under another name, and then gets its own; an adapter to be removed loses its name first. So
none is ever seen in part. All methods block; they know neither calls nor tensors. Other processes may use the same
folder: each upload holds a lock, so that what a process has left behind can be distinguished.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kestrel_runtime.api.adapters import CONFIG_FILE, WEIGHTS_FILE, AdapterName
from kestrel_runtime.api.errors import AdapterNotFound, InvalidRequest, Violation

_PREFIX = ".upload-"  # no name of an adapter begins with a dot
_WEIGHTS_SUFFIX = ".safetensors"
_KEPT_FREE_BYTES = 64 * 2**20
_MAX_ECHO_CHARS = 64
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class AdapterTooLarge(InvalidRequest):
    """The file of an adapter has more than `limit_bytes` bytes."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__((Violation("header.size_bytes", f"must not exceed {limit_bytes}"),))


class AdapterExists(Exception):
    """The name of an uploaded adapter is taken. `reason` is a clause, whose subject is the adapter."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason


class AdapterFolderUnwritable(Exception):
    """The server cannot change its folder of adapters; `reason` is a sentence without its full stop."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class AdapterDiskFull(Exception):
    """The file system of the folder of adapters has too little free space."""


@dataclass(frozen=True, slots=True)
class AnnouncedAdapter:
    """Holds the facts about an adapter that a caller announces before it sends the file of weights."""

    name: AdapterName
    size_bytes: int
    """The size of the file of weights."""
    sha256: str = ""
    """The SHA-256 of the file of weights in hexadecimal digits; empty if the caller did not say it."""
    config: bytes | None = None
    """The file `adapter_config.json`; None if the adapter has none."""
    replaces: bool = False
    """True if an adapter of this name is to be replaced."""


def path_violation(name: AdapterName) -> str | None:
    """Returns why an adapter must not be uploaded under a well-formed name; None if it may be.

    The folder of an adapter may lie in that of another one, whose files it must not look like.
    """
    if any(
        part == CONFIG_FILE or part.endswith(_WEIGHTS_SUFFIX)
        for folder in name.folders()
        for part in PurePosixPath(folder).parts
    ):
        return f"must have no part that is named {CONFIG_FILE} or ends with {_WEIGHTS_SUFFIX}"
    return None


class AdapterFolder:
    """Adds adapters to the folder of `--adapters`, and removes them. May be used by several threads.

    `root` is None if the server has no such folder. `repositories` are names that stand for adapters on the hub.
    """

    def __init__(self, root: str | None, repositories: Collection[str], max_bytes: int) -> None:
        self._root = None if root is None else Path(os.path.realpath(root))
        self._repositories = frozenset(repositories)
        self._max_bytes = max_bytes

    def staged(self, announced: AnnouncedAdapter) -> StagedAdapter:
        """Returns the upload of an adapter, which has written nothing yet.

        Raises `AdapterTooLarge`, and `AdapterFolderUnwritable` if the server takes no uploads.
        """
        root = self._writable_root()
        if announced.size_bytes > self._max_bytes:
            raise AdapterTooLarge(self._max_bytes)
        return StagedAdapter(root, announced, hides_repository=announced.name.path in self._repositories)

    def remove(self, name: AdapterName) -> None:
        """Removes the adapter that the name means now, and the folders around it that are then empty.

        Of a symbolic link, only the link is removed. Raises `AdapterNotFound`, and `AdapterFolderUnwritable` if the
        server cannot write, or the adapter's folder holds anything else.
        """
        root = self._writable_root()
        with _translated_errors(), _locked(root):
            target = next(filter(os.path.lexists, (root / folder for folder in name.folders())), None)
            if target is None or not target.is_dir() or not _is_within(root, target.parent):
                is_listed = name.path in self._repositories
                hint = "; it is a repository on the hub, which --adapter-repositories lists" if is_listed else ""
                raise AdapterNotFound(str(name), f" in the folder of --adapters{hint}")
            if target.is_symlink():
                target.unlink()
            else:
                kept = _other_entry(target)
                if kept is not None:
                    lost = f"has {kept!r} in it, which would be lost; remove it there first"
                    raise AdapterFolderUnwritable(f"the folder of {str(name)!r} {lost}")
                hidden = root / _new_hidden_name()
                os.rename(target, hidden)
                _remove(hidden)
            _remove_empty(root, target.parent)
            _sync(root)

    def _writable_root(self) -> Path:
        if self._root is None:
            raise AdapterFolderUnwritable("the server was started without --adapters, and has no folder for them")
        if not self._max_bytes:
            raise AdapterFolderUnwritable("the server was started with --max-adapter-bytes 0")
        return self._root

    def remove_left_behind(self) -> None:
        """Removes what processes that were killed during an upload have left in the folder."""
        if self._root is None:
            return
        with contextlib.suppress(OSError), _locked(self._root):
            for folder in self._root.glob(f"{_PREFIX}*"):
                with contextlib.suppress(OSError):
                    _remove_if_unused(folder)


class StagedAdapter:
    """The upload of one adapter: `open`, `write` all of its bytes, `finish`, `publish`; `discard` at the end.

    All but `discard` raise `AdapterFolderUnwritable` and `AdapterDiskFull`. `discard` may be called at any time:
    it waits for another thread that is in one of the others.
    """

    def __init__(self, root: Path, announced: AnnouncedAdapter, *, hides_repository: bool) -> None:
        self.folder = _new_hidden_name()
        """The name of the folder that has the files until `publish`, in that of all adapters."""
        self._root = root
        self._path = root / self.folder
        self._announced = announced
        self._hides_repository = hides_repository
        self._lock = threading.Lock()
        self._is_over = False
        self._file: int | None = None
        self._num_bytes = 0
        self._digest = hashlib.sha256()

    def open(self) -> None:
        """Makes the folder and reserves the space. Raises `AdapterExists`, and `InvalidRequest` for the name."""
        with self._step():
            self._require_free(self._target())
            with _locked(self._root):
                os.mkdir(self._path)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._file = os.open(self._path / WEIGHTS_FILE, flags, 0o666)
                fcntl.flock(self._file, fcntl.LOCK_EX)
            free = os.statvfs(self._path)
            if free.f_bavail * free.f_frsize < self._announced.size_bytes + _KEPT_FREE_BYTES:
                raise AdapterDiskFull
            _reserve(self._file, self._announced.size_bytes)
            if self._announced.config is not None:
                (self._path / CONFIG_FILE).write_bytes(self._announced.config)

    def write(self, chunk: bytes) -> None:
        """Appends bytes of the file of weights. Raises `InvalidRequest` if they are more than were announced."""
        with self._step() as file:
            self._num_bytes += len(chunk)
            if self._num_bytes > self._announced.size_bytes:
                raise self._size_mismatch("more")
            self._digest.update(chunk)
            left = memoryview(chunk)
            while left:
                left = left[os.write(file, left) :]

    def finish(self) -> None:
        """Completes the files. Raises `InvalidRequest` if other bytes were written than were announced."""
        with self._step() as file:
            announced, digest = self._announced, self._digest.hexdigest()
            if self._num_bytes != announced.size_bytes:
                raise self._size_mismatch(str(self._num_bytes))
            if announced.sha256 not in ("", digest):
                raise _invalid("header.sha256", f"the received bytes have the digest {digest}")
            os.fsync(file)
            for path in (self._path / CONFIG_FILE, self._path):
                if path.exists():
                    _sync(path)

    def publish(self) -> bool:
        """Gives the adapter its name. Returns True if it has replaced another one.

        Raises `AdapterExists`, and `InvalidRequest` for the name.
        """
        with self._step(), _locked(self._root):
            target = self._target()
            made = _make_folders(self._root, target.parent)
            try:
                has_replaced = self._rename(target)
            except BaseException:
                for folder in reversed(made):
                    with contextlib.suppress(OSError):  # another upload is in it
                        os.rmdir(folder)
                raise
            self._is_over = True
            self._close()
            for folder in {self._root, *made, target.parent}:
                _sync(folder)
            return has_replaced or self._hides_repository

    def discard(self) -> None:
        """Removes the files, unless they are published."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                _remove(self._path)
            self._close()

    @contextlib.contextmanager
    def _step(self) -> Iterator[int]:
        """Yields the descriptor of the file of weights, -1 before it is open."""
        with self._lock:
            if self._is_over:
                raise AdapterFolderUnwritable("the upload has ended")
            with _translated_errors():
                yield -1 if self._file is None else self._file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _target(self) -> Path:
        """Returns the folder that the name means now, or that it is to mean. Raises `InvalidRequest`."""
        folders = [self._root / folder for folder in self._announced.name.folders()]
        target = next(filter(os.path.lexists, folders), folders[0])
        parent = Path(os.path.realpath(target.parent))
        if not _is_within(self._root, parent):
            raise _invalid("header.name", "leads out of the folder of adapters")
        if any(path.exists() and not path.is_dir() for path in (parent, *parent.parents)):
            raise _invalid("header.name", "needs a folder where there is a file")
        return target

    def _require_free(self, target: Path) -> None:
        """Raises `AdapterExists` if the adapter must not take this place."""
        name = str(self._announced.name)
        is_taken = os.path.lexists(target)
        if (is_taken or self._hides_repository) and not self._announced.replaces:
            raise AdapterExists(name, "exists already, and is replaced only on request")
        if not is_taken or target.is_symlink():
            return
        if not target.is_dir():
            raise AdapterExists(name, "is a file, which is not replaced")
        kept = _other_entry(target)
        if kept is not None:
            raise AdapterExists(
                name, f"is a folder with {kept!r} in it, which would be lost; remove it there first"
            )

    def _rename(self, target: Path) -> bool:
        """Moves the folder to its place. Returns True if another one was there."""
        self._require_free(target)
        if not os.path.lexists(target):
            try:
                os.rename(self._path, target)
                return False
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            self._require_free(target)  # it has been made meanwhile
        _exchange(self._path, target)
        _remove(self._path)
        return True

    def _size_mismatch(self, received: str) -> InvalidRequest:
        text = f"is {self._announced.size_bytes}, but {received} bytes were received"
        return _invalid("header.size_bytes", text)


@contextlib.contextmanager
def _translated_errors() -> Iterator[None]:
    """Raises errors of the system as `AdapterDiskFull` or `AdapterFolderUnwritable`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise AdapterDiskFull from None
        raise AdapterFolderUnwritable(
            f"the server cannot write to the folder of --adapters: {error.strerror}"
        ) from None


def _new_hidden_name() -> str:
    """Returns the name of a folder that no adapter can have."""
    return f"{_PREFIX}{secrets.token_hex(8)}"


def _is_within(root: Path, folder: Path) -> bool:
    """Returns True if a folder lies in `root`, which is free of symbolic links, or is `root`."""
    return Path(os.path.realpath(folder)).is_relative_to(root)


def _other_entry(folder: Path) -> str | None:
    """Returns the shortened name of an entry of a folder that is no file of an adapter; None without one."""
    with os.scandir(folder) as entries:
        for entry in entries:
            is_part = entry.name == CONFIG_FILE or entry.name.endswith(_WEIGHTS_SUFFIX)
            if not is_part or entry.is_dir(follow_symlinks=False):
                return entry.name[:_MAX_ECHO_CHARS]
    return None


def _remove_empty(root: Path, folder: Path) -> None:
    """Removes a folder below `root` and those around it, as long as they are empty."""
    with contextlib.suppress(OSError):
        while folder != root:
            os.rmdir(folder)
            folder = folder.parent


def _reserve(file: int, num_bytes: int) -> None:
    """Reserves space for a file, so that several uploads cannot count on the same. Raises `OSError`."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):  # the file system cannot
            raise


def _invalid(field: str, description: str) -> InvalidRequest:
    return InvalidRequest((Violation(field, description),))


def _make_folders(root: Path, folder: Path) -> list[Path]:
    """Makes the folders from `root` to `folder` that are not there, and returns them."""
    made: list[Path] = []
    path = root
    for part in folder.relative_to(root).parts:
        path = path / part
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            made.append(path)
    return made


def _exchange(one: Path, other: Path) -> None:
    """Exchanges two folders, so that neither name is ever without one. Raises `OSError`."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise _not_exchanged()
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    if library.renameat2(*paths, _RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP):
        raise _not_exchanged()
    raise OSError(number, os.strerror(number))


def _not_exchanged() -> AdapterFolderUnwritable:
    return AdapterFolderUnwritable(
        "its file system cannot replace a folder at once; remove the adapter there, then upload it"
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, so that no upload is removed before it holds its own."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a network file system may refuse it for folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_if_unused(folder: Path) -> None:
    """Removes the folder of an upload whose process is gone. Raises `OSError` if the upload still runs."""
    if folder.is_symlink():  # a replaced link
        folder.unlink()
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):
            file = os.open(folder / WEIGHTS_FILE, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Has the system write a file or the entries of a folder to the disk, where it can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
