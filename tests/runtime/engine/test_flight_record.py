"""Who finds a process dead learns which requests were in flight."""

from __future__ import annotations

from pathlib import Path

from kestrel_runtime.engine.flight_record import FlightRecord


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
