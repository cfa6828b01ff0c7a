"""Records which requests take part in the steps in flight, in a file that outlives the process.

The file is mapped into memory, so writing it costs some microseconds, and what was written survives the process.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_SIZE_BYTES = 2**18
"""The size of the file: more than the fingerprints of the largest batches in flight take."""
_LENGTH = struct.Struct("<I")


class RecordUnavailable(Exception):
    """Raised if the file cannot be created; the message says which and why."""


class FlightRecord:
    """The record in the file at `path`, which replaces an earlier one. One thread writes it.

    Raises `RecordUnavailable`.
    """

    def __init__(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                # A write to a page for which the file system has no space would end the process with SIGBUS. What
                # an earlier process has allocated is kept, which works on a full file system, too.
                os.posix_fallocate(descriptor, 0, _SIZE_BYTES)
                self._content = mmap.mmap(descriptor, _SIZE_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RecordUnavailable(f"cannot write {path}: {error.strerror}") from error
        _LENGTH.pack_into(self._content, 0, 0)

    def write(self, fingerprints: Iterable[str]) -> None:
        """Replace what was written before."""
        data = "\n".join(fingerprints).encode()[: _SIZE_BYTES - _LENGTH.size]
        _LENGTH.pack_into(self._content, 0, 0)  # nothing is read of a record that is being written
        self._content[_LENGTH.size : _LENGTH.size + len(data)] = data
        _LENGTH.pack_into(self._content, 0, len(data))

    @staticmethod
    def read(path: Path) -> frozenset[str]:
        """Returns what was written last at `path`; an empty set if there is no record."""
        try:
            content = path.read_bytes()
        except OSError:
            return frozenset()
        if len(content) < _LENGTH.size:
            return frozenset()
        (length,) = _LENGTH.unpack_from(content)
        return frozenset(content[_LENGTH.size : _LENGTH.size + length].decode(errors="replace").split())
