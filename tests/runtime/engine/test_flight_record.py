"""Who finds a process dead learns which requests were in flight."""

import errno
import os
from pathlib import Path

import pytest

from kestrel_runtime.engine.flight_record import FlightRecord, RecordUnavailable


def test_what_was_written_last_is_read(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    assert FlightRecord.read(path) == frozenset()
    record = FlightRecord(path)
    assert FlightRecord.read(path) == frozenset()
    many = {f"query-{number:032x}-adapter" for number in range(2_000)}
    for written in ({"query-a", "point-b"}, many, {"caption-c"}, set[str]()):
        record.write(written)
        assert FlightRecord.read(path) == written


def test_the_record_of_the_next_process_begins_empty(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    FlightRecord(path).write(["query-a"])
    FlightRecord(path)
    assert FlightRecord.read(path) == frozenset()


def test_a_damaged_record_is_read_without_an_error(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    for content in (b"", b"\x01", b"\xff\xff\xff\xff\xfe"):
        path.write_bytes(content)
        FlightRecord.read(path)


def test_the_whole_record_has_its_space_from_the_start_and_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "core-0.steps"
    FlightRecord(path).write(["query-a"])
    before = path.stat()
    assert before.st_blocks * 512 >= before.st_size, "a page without a block would end the process with SIGBUS"
    FlightRecord(path)  # on a file system that is full by now
    assert path.stat().st_ino == before.st_ino
    assert FlightRecord.read(path) == frozenset()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_file_system_without_space_for_the_record_is_said_in_one_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(RecordUnavailable, match=f"^cannot write .*core-0.steps: {os.strerror(number)}$"):
        FlightRecord(tmp_path / "core-0.steps")
