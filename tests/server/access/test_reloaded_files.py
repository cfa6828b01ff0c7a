import logging
import os
from pathlib import Path

import pytest

from kestrel_grpc.access.reloaded_files import ReloadedFiles


def replace(path: Path, text: str) -> None:
    """As a careful operator does, and as Kubernetes does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "number"
    path.write_text("1")
    return path


@pytest.fixture
def number(path: Path) -> ReloadedFiles[int]:
    return ReloadedFiles((path,), lambda: int(path.read_text()))


def test_an_unchanged_file_is_not_read_again(path):
    readings: list[str] = []
    files = ReloadedFiles((path,), lambda: readings.append("read"))
    assert not files.refresh()
    assert readings == ["read"]


def test_a_replaced_file_is_read_again(number, path):
    replace(path, "2")
    assert number.refresh()
    assert number.value == 2
    assert not number.refresh()


def test_a_file_that_is_written_in_place_is_read_again(number, path):
    path.write_text("22")
    assert number.refresh()
    assert number.value == 22


def test_a_broken_file_keeps_the_last_good_value_and_is_logged_once(number, path, caplog):
    replace(path, "two")
    assert not number.refresh()
    assert not number.refresh()
    assert number.value == 1
    assert [(record.levelno, str(path) in record.message) for record in caplog.records] == [(logging.ERROR, True)]


def test_a_missing_file_keeps_the_last_good_value(number, path):
    path.unlink()
    assert not number.refresh()
    assert number.value == 1


def test_a_repaired_file_is_read_again(number, path):
    replace(path, "two")
    number.refresh()
    replace(path, "2")
    assert number.refresh()
    assert number.value == 2


def test_a_file_that_changes_while_it_is_read_is_read_once_more(path):
    texts = iter(["2", "3", "3"])

    def read() -> int:
        number = int(path.read_text())
        if number > 1:
            replace(path, next(texts))
        return number

    files = ReloadedFiles((path,), read)
    replace(path, "2")
    assert not files.refresh()
    assert files.value == 1


def test_the_first_reading_may_fail(path):
    path.write_text("one")
    with pytest.raises(ValueError, match="one"):
        ReloadedFiles((path,), lambda: int(path.read_text()))
