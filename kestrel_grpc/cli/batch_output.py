"""The output of `kestrel-grpc batch`, and the record by which an interrupted run goes on.

Beside the output `out.jsonl` a run keeps `out.jsonl.resume` until it has ended: a line of JSON with what answers
depend on, then a digest of the input record of each output line. A digest is written before its line, so that after
a kill there are at least as many digests as whole lines. Both files are handed to the system line by line and not
forced to the disk: a kill of the process loses no line that was written, a power failure may.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from kestrel_grpc.cli.batch_lines import DIGEST_BYTES, OutputLine, Record, is_failure

_DIGEST_LINE_BYTES = 2 * DIGEST_BYTES + 1
_FIRST_WORDS = "kestrel-grpc batch"


class OutputRefused(Exception):
    """The output cannot be written, or the run cannot go on with it; the text says why."""


class Output:
    """Appends lines to the file at `path`. The file is locked until `close`.

    `num_lines` counts those in the file, `num_resumed` those that an earlier run has written, and `num_failures`
    the lines of both whose requests have failed.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resumes: bool, replaces: bool) -> None:
        """Nothing is replaced before the first line is written. `settings` is what answers depend on, apart from
        the input. Raises `OutputRefused`."""
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
            self._lock()
            if has_lines and resumes:
                self._resume()
        except BaseException:
            self.close()
            raise
        self.num_resumed = self.num_lines

    def skip_answered(self, records: Iterator[Record]) -> None:
        """Take the records that the lines answer. Raises `OutputRefused` if the input has changed."""
        for number in range(1, self.num_resumed + 1):
            record = next(records, None)
            if record is None or record.digest != next(self._digests):
                raise OutputRefused(
                    f"the input has changed: its record {number} is not the one that {self.path} answers; "
                    "--force begins anew"
                )

    def append(self, digest: str, line: OutputLine) -> None:
        """Write the line of the next record. Raises OSError."""
        record = self._record or self._begin()
        _write(record, digest.encode() + b"\n")
        _write(self._file, line.data)
        self.num_lines += 1
        self.num_failures += line.is_failure

    def finish(self) -> None:
        """Every record is answered: there is nothing to go on with. Raises OSError."""
        if self._record is None:
            self._begin()
        os.fsync(self._file.fileno())
        self.record_path.unlink()

    def close(self) -> None:
        """Leaves no file where there was none and nothing was written. May be repeated."""
        self._file.close()
        if self._record is not None:
            self._record.close()
        elif self._is_new:
            self.path.unlink(missing_ok=True)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputRefused(f"{self.path}: another process writes this file") from error

    def _begin(self) -> FileIO:
        # The record comes first: a whole line without a digest would belong to no known run.
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
        # As JSON has them: a tuple is a list.
        ours = json.loads(json.dumps(self._settings))
        changed = sorted(name for name in known.keys() | ours.keys() if known.get(name) != ours.get(name))
        if changed:
            raise OutputRefused(
                f"{self.path} was begun with another {', '.join(changed)}; --force begins anew with the new one"
            )


def _write(file: FileIO, data: bytes) -> None:
    # Without a buffer, which would be written a second time after a full disk.
    while data:
        data = data[file.write(data) :]


def _lines_from(path: Path, begin: int) -> Iterator[str]:
    """The lines of a file from a position on."""
    with path.open("rb") as file:
        file.seek(begin)
        for line in file:
            yield line.rstrip().decode()
