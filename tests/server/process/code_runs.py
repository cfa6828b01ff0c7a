"""Runs code in a process of its own."""

import subprocess
import sys

MAX_WAIT_S = 60


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=MAX_WAIT_S)
