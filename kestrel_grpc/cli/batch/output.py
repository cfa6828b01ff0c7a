"""Writes the output of `kestrel-grpc batch`, and the record from which an interrupted run is resumed.

Until a run has ended, it keeps the file `out.jsonl.resume` next to its output `out.jsonl`: a line of JSON with all
settings that answers depend on, then a digest of the input record of each output line. A digest is written before
its line, so that after a kill there are at least as many digests as whole lines. Both files are written to the
system line by line and not forced to the disk: a kill of the process loses no written line, a power failure may.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, Protocol

from kestrel_grpc.cli.batch.lines import DIGEST_BYTES, OutputLine, Record, id_of, is_failure

_DIGEST_LINE_BYTES = 2 * DIGEST_BYTES + 1
_FIRST_WORDS = "kestrel-grpc batch"


class OutputRefused(Exception):
    """The output cannot be written, or the run cannot resume it; the text says why."""


class AnyOutput(Protocol):
    """Takes the lines of a run, in order. `num_lines` counts them, and `num_failures` the failed ones."""

    num_lines: int
    num_failures: int

    def append(self, digest: str, line: OutputLine) -> None:
        """Writes the line of the next record. Raises OSError."""
        ...

    def finish(self) -> None:
        """Completes the output once every record is answered. Raises OSError."""
        ...

    def close(self) -> None:
        """Keeps the lines written so far. May be repeated."""
        ...


class StreamOutput:
    """Writes lines to standard output, a pipe or another file that cannot be resumed."""

    def __init__(self, file: FileIO) -> None:
        self.num_lines = self.num_failures = 0
        self._file = file

    def append(self, digest: str, line: OutputLine) -> None:
        _write(self._file, line.data)
        self.num_lines += 1
        self.num_failures += line.is_failure

    def finish(self) -> None:
        """Does nothing: all lines are written already."""

    def close(self) -> None:
        self._file.close()


class RetriedOutput:
    """Replaces the failed lines of a complete output, in order.

    The lines are written to a file named `OUT.retry`, which replaces the output in the end. If the run ends early,
    it keeps the old lines of the records that were not tried again. `num_lines` counts the replaced lines.
    """

    def __init__(self, path: Path, ids: Iterable[str | int]) -> None:
        """Opens the output. `ids` are those of all records of the input.

        Raises `OutputRefused` if the lines answer other records.
        """
        self.num_lines = self.num_failures = 0
        self.failed: frozenset[int] = frozenset()
        """The numbers of the records whose lines are replaced, from 1."""
        if path.with_name(f"{path.name}.resume").exists():
            raise OutputRefused(f"{path} is not complete: --resume goes on with it, then --retry-failed")
        self._path = path
        self._new_path = path.with_name(f"{path.name}.retry")
        self._new: FileIO | None = None
        try:
            self._old = path.open("rb")
        except OSError as error:
            raise OutputRefused(f"{path}: {error.strerror or error}") from error
        try:
            _lock(self._old, path)
            self.failed = frozenset(self._failed_of(ids))
        except BaseException:
            self._old.close()
            raise
        self._old.seek(0)
        self._position = 0

    def append(self, digest: str, line: OutputLine) -> None:
        new = self._new or self._begin()
        for old in self._old:
            self._position += 1
            if self._position in self.failed:
                break
            _write(new, old)
        _write(new, line.data)
        self.num_lines += 1
        self.num_failures += line.is_failure

    def finish(self) -> None:
        """Replaces the old file by the new one. Raises OSError."""
        if self._new is not None:
            for old in self._old:
                _write(self._new, old)
            os.fsync(self._new.fileno())
            self._new.close()
            self._new = None
            self._new_path.replace(self._path)

    def close(self) -> None:
        try:
            self.finish()
        finally:
            self._old.close()

    def _begin(self) -> FileIO:
        self._new = FileIO(self._new_path, "w")
        os.fchmod(self._new.fileno(), stat.S_IMODE(os.fstat(self._old.fileno()).st_mode))
        return self._new

    def _failed_of(self, ids: Iterable[str | int]) -> Iterator[int]:
        """Yields the numbers of the failed lines."""
        for number, (id, line) in enumerate(zip_longest(ids, self._old), 1):
            if id is None or line is None or id_of(line) != id:
                raise OutputRefused(f"{self._path} does not answer this input: record {number} has no line in it")
            if is_failure(line):
                yield number


class Output:
    """Appends lines to the file at `path`. The file is locked until `close`.

    `num_lines` counts the lines in the file, `num_resumed` the lines of earlier runs, and `num_failures` all lines
    whose requests have failed.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resumes: bool, replaces: bool) -> None:
        """Opens the output, which stays unchanged until the first line is written.

        `settings` is all that answers depend on, apart from the input. Raises `OutputRefused`.
        """
        self.path = path
        self.record_path = path.with_name(f"{path.name}.resume")
        self.num_lines = self.num_failures = 0
        self._record: FileIO | None = None
        self._digests: Iterator[str] = iter(())
        self._settings = {"written_by": _FIRST_WORDS, **settings}
        try:
            has_lines = path.exists() and path.stat().st_size > 0
            if has_lines and not (resumes or replaces):
                raise OutputRefused(f"{path} exists: --resume goes on with it, --force replaces it")
            self._is_new = not path.exists()
            self._file = FileIO(path, "a")
        except OSError as error:
            raise OutputRefused(f"{error.filename or path}: {error.strerror or error}") from error
        try:
            _lock(self._file, self.path)
            if has_lines and resumes:
                self._resume()
        except BaseException:
            self.close()
            raise
        self.num_resumed = self.num_lines

    def skip_answered(self, records: Iterator[Record]) -> None:
        """Skips the records that the lines answer. Raises `OutputRefused` if the input has changed."""
        for number in range(1, self.num_resumed + 1):
            record = next(records, None)
            if record is None or record.digest != next(self._digests):
                raise OutputRefused(
                    f"the input has changed: its record {number} is not the one that {self.path} answers; "
                    "--force begins anew"
                )

    def append(self, digest: str, line: OutputLine) -> None:
        """Writes the line of the next record. Raises OSError."""
        record = self._record or self._begin()
        _write(record, digest.encode() + b"\n")
        _write(self._file, line.data)
        self.num_lines += 1
        self.num_failures += line.is_failure

    def finish(self) -> None:
        """Removes the record of the run once every line is written: nothing is left to resume. Raises OSError."""
        if self._record is None:
            self._begin()
        os.fsync(self._file.fileno())
        self.record_path.unlink()

    def close(self) -> None:
        """Closes the file, and removes it if it is new and empty. May be repeated."""
        self._file.close()
        if self._record is not None:
            self._record.close()
        elif self._is_new:
            self.path.unlink(missing_ok=True)

    def _begin(self) -> FileIO:
        # The record is written first: a whole line without a digest would belong to no known run.
        self._record = FileIO(self.record_path, "w")
        _write(self._record, json.dumps(self._settings).encode() + b"\n")
        self._file.truncate(0)
        return self._record

    def _resume(self) -> None:
        if not self.record_path.exists():
            raise OutputRefused(
                f"{self.path} is complete, or was not written by this command: there is no {self.record_path.name}"
            )
        with self.record_path.open("rb") as known:
            self._require_same_settings(known.readline())
            begin = known.tell()
        num_digests = (self.record_path.stat().st_size - begin) // _DIGEST_LINE_BYTES
        num_bytes = 0
        with self.path.open("rb") as file:
            for line in file:
                if self.num_lines == num_digests or not line.endswith(b"\n"):
                    break
                self.num_lines += 1
                self.num_failures += is_failure(line)
                num_bytes += len(line)
        self._file.truncate(num_bytes)
        self._record = FileIO(self.record_path, "a")
        self._record.truncate(begin + self.num_lines * _DIGEST_LINE_BYTES)
        self._digests = _lines_from(self.record_path, begin)

    def _require_same_settings(self, head: bytes) -> None:
        try:
            known = json.loads(head)
        except ValueError:
            known = None
        if not isinstance(known, dict) or known.get("written_by") != _FIRST_WORDS:
            raise OutputRefused(f"{self.record_path} is not a record of this command")
        # Compared as JSON, in which a tuple is a list.
        ours = json.loads(json.dumps(self._settings))
        changed = sorted(name for name in known.keys() | ours.keys() if known.get(name) != ours.get(name))
        if changed:
            raise OutputRefused(
                f"{self.path} was begun with another {', '.join(changed)}; --force begins anew with the new one"
            )


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputRefused(f"{path}: another process writes this file") from error


def _write(file: FileIO, data: bytes) -> None:
    # Unbuffered: a buffer would be written a second time after a full disk.
    while data:
        data = data[file.write(data) :]


def _lines_from(path: Path, begin: int) -> Iterator[str]:
    """Yields the lines of a file from a position on."""
    with path.open("rb") as file:
        file.seek(begin)
        for line in file:
            yield line.rstrip().decode()
