"""A process ends whatever its threads do."""

import pytest

from tests.server.process.code_runs import run


@pytest.mark.parametrize(
    "hangs",
    ["threading.Event().wait()", "sum(range(10**13))", "threading.Thread(target=threading.Event().wait).start()"],
    ids=["in the main thread", "with the interpreter's lock", "in a thread that Python waits for"],
)
def test_a_process_that_does_not_end_by_itself_is_ended_and_says_where_it_was(hangs: str) -> None:
    ended = run(f"import threading; from kestrel_grpc.process.exit import end_within; end_within(0.2); {hangs}")
    assert ended.returncode == 1
    assert 'File "<string>", line 1' in ended.stderr or "threading.py" in ended.stderr


def test_a_process_that_ends_in_time_is_left_alone() -> None:
    ended = run("import sys; from kestrel_grpc.process.exit import end_within; end_within(30); sys.exit(3)")
    assert (ended.returncode, ended.stderr) == (3, "")


def test_ending_now_waits_for_no_thread_and_loses_no_line() -> None:
    ended = run(
        "import threading; from kestrel_grpc.process.exit import end_now;"
        "threading.Thread(target=threading.Event().wait).start(); print('said', end=''); end_now(4)"
    )
    assert (ended.returncode, ended.stdout) == (4, "said")


def test_ending_now_needs_no_standard_output() -> None:
    assert (
        run("import sys; from kestrel_grpc.process.exit import end_now; sys.stdout = None; end_now(5)").returncode
        == 5
    )
