"""Signals ask a process to stop or to read its files again."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable

import pytest

from kestrel_grpc.process.signals import Interruption
from tests.server.process.code_runs import run


def test_the_first_signal_is_noted_and_an_interrupt_after_it_raises() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interruption() as interruption:
        assert interruption.number is None
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            assert interruption.number is signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


_HANGS_UP = """
import asyncio, os, signal, sys
from kestrel_grpc.process.signals import stop_signals

async def main():
    read = asyncio.Event()
    with stop_signals(lambda: (print("reads again", flush=True), read.set())) as signals:
        print("ready", flush=True)
        await asyncio.wait((signals.first, asyncio.ensure_future(read.wait())), return_when=asyncio.FIRST_COMPLETED)
        if signals.first.done():
            signals.hang_up()  # a shell sends another
            print(signals.first.result().name, signals.second.done(), flush=True)

asyncio.run(main())
"""


def _has_terminal(descriptor: int) -> Callable[[], None]:
    def take() -> None:
        os.setsid()
        fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)

    return take


def test_a_terminal_that_is_gone_asks_the_process_to_stop_once() -> None:
    terminal, inner = os.openpty()
    process = subprocess.Popen(
        (sys.executable, "-c", _HANGS_UP),
        stdin=inner,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_has_terminal(inner),
    )
    os.close(inner)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.close(terminal)
        assert process.stdout.read() == "SIGHUP False\n"
    assert process.returncode == 0


@pytest.mark.parametrize("has_terminal", [False, True])
def test_sighup_without_a_lost_terminal_reads_files_again(has_terminal: bool) -> None:
    terminal, inner = os.openpty()
    with subprocess.Popen(
        (sys.executable, "-c", _HANGS_UP),
        stdin=inner if has_terminal else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.read() == "reads again\n"
    assert process.returncode == 0
    os.close(inner)
    os.close(terminal)


def test_a_process_that_was_started_to_ignore_sighup_goes_on_to_do_so() -> None:
    ended = run(
        "import asyncio, os, signal\n"
        "from kestrel_grpc.process.signals import stop_signals\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "async def main():\n"
        "    with stop_signals(lambda: print('reads again')):\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "        await asyncio.sleep(0)\n"
        "asyncio.run(main())\n"
        "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    )
    assert (ended.returncode, ended.stdout) == (0, "True\n")
