"""A file that says which requests take part in the steps in flight, for whoever finds the process dead.

The file is mapped into memory, so writing it costs some microseconds, and what was written survives the process.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_SIZE_BYTES = 2**18
"""More than the fingerprints of the largest batches in flight take."""
_LENGTH = struct.Struct("<I")


class FlightRecord:
    """Fingerprints in a new file at `path`. One thread writes it."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE_BYTES)
            self._content = mmap.mmap(descriptor, _SIZE_BYTES)
        finally:
            os.close(descriptor)

    def write(self, fingerprints: Iterable[str]) -> None:
        """Replace what was written before."""
        data = "\n".join(fingerprints).encode()[: _SIZE_BYTES - _LENGTH.size]
        _LENGTH.pack_into(self._content, 0, 0)  # nothing is read of a record that is being written
        self._content[_LENGTH.size : _LENGTH.size + len(data)] = data
        _LENGTH.pack_into(self._content, 0, len(data))

    @staticmethod
    def read(path: Path) -> frozenset[str]:
        """What was written last at `path`; empty where there is no record."""
        try:
            content = path.read_bytes()
        except OSError:
            return frozenset()
        if len(content) < _LENGTH.size:
            return frozenset()
        (length,) = _LENGTH.unpack_from(content)
        return frozenset(content[_LENGTH.size : _LENGTH.size + length].decode(errors="replace").split())
