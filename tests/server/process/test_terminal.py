"""Closed or full standard streams end no command with a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_give_their_numbers_to_no_file(closed: str, tmp_path: Path) -> None:
    script = (
        "import os, sys; from kestrel_grpc.process.terminal import print_error, open_standard_streams\n"
        "open_standard_streams()\n"
        "file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY); print('a line', flush=True)\n"
        "print_error('another')\n"
        "os.write(1, b'one'); os.write(2, b'two'); os.read(0, 1)\n"
        "child = os.spawnv(os.P_WAIT, '/bin/sh', ['sh', '-c', 'echo x && echo y >&2'])\n"
        "sys.exit(file <= 2 or child)\n"
    )
    target = tmp_path / "other"
    command = ("sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", script, str(target))
    assert subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0
    assert target.read_bytes() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("streams", "status"), [(">/dev/full", 1), (">&-", 0), (">/dev/full 2>/dev/full", 1)])
def test_a_command_whose_output_is_not_taken_says_so_in_one_line(streams: str, status: int) -> None:
    command = ("sh", "-c", f'"$0" "$@" {streams}', sys.executable, "-m", "kestrel_grpc", "completion", "bash")
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == status
    said = "kestrel-grpc: the output cannot be written: No space left on device\n"
    assert ended.stderr == (said if streams == ">/dev/full" else "")
