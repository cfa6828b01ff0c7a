"""The output file of a batch and its record: begun, gone on with, replaced, refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kestrel_grpc.cli.batch.lines import OutputLine, Record
from kestrel_grpc.cli.batch.output import Output, OutputRefused, RetriedOutput

SETTINGS = {"skill": "query", "seed": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def records(count: int, changed: int = 0) -> Iterator[Record]:
    return (Record(number, f"{number + 100 * (number == changed):016x}", b"") for number in range(1, count + 1))


@contextmanager
def opened(path: Path, settings: dict[str, Any] | None = None, **how: bool) -> Iterator[Output]:
    output = Output(path, settings or SETTINGS, **{"resumes": False, "replaces": False, **how})
    try:
        yield output
    finally:
        output.close()


def answer(output: Output, given: Iterator[Record], count: int) -> None:
    for record in (next(given) for _ in range(count)):
        output.append(record.digest, OutputLine(b'{"id":%d}\n' % record.number, is_failure=False))


def begin(path: Path, count: int) -> None:
    """Leave what a run leaves that was killed after some lines."""
    with opened(path) as output:
        answer(output, records(9), count)


def test_a_whole_run_leaves_its_lines_alone(path):
    with opened(path) as output:
        answer(output, records(2), 2)
        assert output.record_path.exists()
        output.finish()
    assert path.read_text() == '{"id":1}\n{"id":2}\n'
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("torn", ["", '{"id":', '{"id":4}'])
def test_a_run_goes_on_behind_the_last_whole_line(path, torn):
    begin(path, 3)
    with path.open("a") as file:
        file.write(torn)
    given = records(9)
    with opened(path, resumes=True) as output:
        assert (output.num_lines, output.num_resumed) == (3, 3)
        output.skip_answered(given)
        answer(output, given, 2)
    assert path.read_text().splitlines() == [f'{{"id":{number}}}' for number in range(1, 6)]
    with opened(path, resumes=True) as output:
        assert output.num_resumed == 5


def test_a_line_whose_digest_was_lost_is_answered_again(path):
    begin(path, 3)
    record = path.with_name("out.jsonl.resume")
    record.write_bytes(record.read_bytes()[:-5])
    with opened(path, resumes=True) as output:
        assert output.num_lines == 2
    assert path.read_text() == '{"id":1}\n{"id":2}\n'


def test_failures_of_the_earlier_run_count(path):
    with opened(path) as output:
        output.append(
            next(records(1)).digest, OutputLine(b'{"id":1,"error":{"code":"INTERNAL"}}\n', is_failure=True)
        )
        assert output.num_failures == 1
    with opened(path, resumes=True) as output:
        assert output.num_failures == 1


@pytest.mark.parametrize("given", [records(9, changed=2), records(2)])
def test_an_input_that_has_changed_is_refused(path, given):
    begin(path, 3)
    with (
        opened(path, resumes=True) as output,
        pytest.raises(OutputRefused, match="the input has changed: its record"),
    ):
        output.skip_answered(given)
    assert path.read_text().count("\n") == 3


def test_other_settings_are_refused_by_name(path):
    begin(path, 3)
    with pytest.raises(OutputRefused, match="begun with another seed, skill"):
        Output(path, {"skill": "caption", "seed": 1}, resumes=True, replaces=False)


def test_a_file_of_others_is_left_alone(path):
    path.write_text("precious\n")
    with pytest.raises(OutputRefused, match="--resume goes on with it, --force replaces it"):
        Output(path, SETTINGS, resumes=False, replaces=False)
    with pytest.raises(OutputRefused, match="was not written by this command"):
        Output(path, SETTINGS, resumes=True, replaces=False)
    path.with_name("out.jsonl.resume").write_text('{"id": 1}\n')
    with pytest.raises(OutputRefused, match="is not a record of this command"):
        Output(path, SETTINGS, resumes=True, replaces=False)
    assert path.read_text() == "precious\n"


def test_a_file_is_replaced_by_the_first_line_and_not_before(path):
    path.write_text("old\n")
    with opened(path, replaces=True) as output:
        assert path.read_text() == "old\n"
        answer(output, records(1), 1)
    assert path.read_text() == '{"id":1}\n'


def test_resuming_nothing_begins(path):
    given = records(2)
    with opened(path, resumes=True) as output:
        output.skip_answered(given)
        answer(output, given, 2)
        output.finish()
    assert path.read_text().count("\n") == 2


def test_a_run_that_writes_nothing_leaves_nothing(path):
    with opened(path):
        assert path.exists()
    assert list(path.parent.iterdir()) == []
    path.touch()
    with opened(path):
        pass
    assert list(path.parent.iterdir()) == [path]


def test_two_runs_do_not_write_one_file(path):
    with opened(path), pytest.raises(OutputRefused, match="another process writes this file"):
        Output(path, SETTINGS, resumes=False, replaces=False)


LINES = b'{"id":1}\n{"id":2,"error":{"code":"X"}}\n{"id":3}\n{"id":4,"error":{"code":"X"}}\n{"id":5}\n'


def again(path: Path, count: int) -> RetriedOutput:
    """Answer so many of the failed lines again."""
    output = RetriedOutput(path, range(1, 6))
    for number in sorted(output.failed)[:count]:
        output.append("", OutputLine(b'{"id":%d,"again":true}\n' % number, is_failure=False))
    return output


@pytest.mark.parametrize(("count", "answered"), [(2, (2, 4)), (1, (2,)), (0, ())])
def test_failed_lines_are_replaced_where_they_are(path, count, answered):
    path.write_bytes(LINES)
    output = again(path, count)
    assert (output.failed, output.num_lines) == ({2, 4}, count)
    if count == 2:
        output.finish()
    output.close()
    lines = LINES.splitlines(keepends=True)
    for number in answered:
        lines[number - 1] = b'{"id":%d,"again":true}\n' % number
    assert path.read_bytes() == b"".join(lines)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("ids", [range(1, 5), range(1, 7), (1, 2, 4, 4, 5), ()])
def test_lines_of_another_input_are_not_replaced(path, ids):
    path.write_bytes(LINES)
    with pytest.raises(OutputRefused, match="does not answer this input"):
        RetriedOutput(path, ids)
    assert path.read_bytes() == LINES


def test_an_output_that_is_not_complete_is_gone_on_with_first(path):
    begin(path, 2)
    with pytest.raises(OutputRefused, match="--resume goes on with it"):
        RetriedOutput(path, (1, 2))
    with pytest.raises(OutputRefused, match="No such file"):
        RetriedOutput(path.with_name("none.jsonl"), ())
