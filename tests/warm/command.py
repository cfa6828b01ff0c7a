"""A command of a shell whose program a listening starter begins: `python -IS command.py SOCKET MODULE WORD …`.

The program has the standard streams, the folder and the variables of this process. This process passes SIGINT and
SIGTERM on to it and ends as it ends. It imports as little as it can, since it is there to start quickly.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from types import FrameType

_PASSED_ON = (signal.SIGINT, signal.SIGTERM)


def main(path: str, module: str, *words: str) -> int:
    """The exit status of the program."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    start = {
        "arguments": ("-m", module, *words),
        "folder": os.getcwd(),
        "variables": {"GRPC_VERBOSITY": "NONE", **os.environ},
        "numbers": (0, 1, 2),
        "blocked_signals": [int(number) for number in before],
        "descriptor_limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "is_session_leader": False,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(start).encode()], [0, 1, 2])
        pid = int(connection.recv(32))

        def pass_on(number: int, frame: FrameType | None) -> None:
            os.kill(pid, number)

        for number in _PASSED_ON:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        status = int(connection.recv(32))
    if status < 0:  # ended by a signal
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
