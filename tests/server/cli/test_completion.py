"""`kestrel-grpc completion`: the script, read by a true bash, completes commands, options and values."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference_fixtures import CHECKOUT

ACTIVATED = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
# What bash does when Tab is pressed behind a line: it calls the function that was registered for the command.
TAB = """
source <(kestrel-grpc completion bash)
[[ $(complete -p kestrel-grpc) =~ -F\\ ([^ ]+) ]]
for line in "$@"; do
    COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=9 COMPREPLY=()
    "${BASH_REMATCH[1]}" kestrel-grpc
    echo "${COMPREPLY[@]}"
done
"""


LINES = ("kestrel-grpc cap", "kestrel-grpc caption --max-t", "kestrel-grpc caption --length ")


def printed(*command: str) -> str:
    done = subprocess.run(command, cwd=CHECKOUT, env=ACTIVATED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bash_completes_commands_options_and_values() -> None:
    command, option, values = printed("bash", "-euc", TAB, "bash", *LINES).splitlines()
    assert command.split() == ["caption"]
    assert option.split() == ["--max-tokens"]
    assert set(values.split()) == {"short", "normal", "long"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_commands_options_and_values() -> None:
    script = "kestrel-grpc completion fish | source; for line in $argv; complete --do-complete $line; echo; end"
    command, option, values = printed("fish", "--no-config", "-c", script, *LINES).rstrip().split("\n\n")
    assert command.split()[0] == "caption"
    assert option.split()[0] == "--max-tokens"
    assert {line.split()[0] for line in values.splitlines()} == {"short", "normal", "long"}
