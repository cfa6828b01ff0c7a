"""`kestrel-grpc completion`: the script, read by a true shell, completes commands, options and values."""

import os
import pty
import select
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
# A widget tells the line as it is after Tab. What the terminal shows would have to be understood.
ZSHRC = """
eval "$(kestrel-grpc completion zsh)"
tell() { print -r -- "<$BUFFER>" >"$ZDOTDIR/told"; BUFFER= }
zle -N tell
bindkey '^X' tell
PROMPT='ready> '
"""
LONGEST_S = 60.0

LINES = ("kestrel-grpc cap", "kestrel-grpc caption --max-t", "kestrel-grpc caption --length ")


def printed(*command: str) -> str:
    done = subprocess.run(command, cwd=CHECKOUT, env=ACTIVATED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bash_completes_commands_options_and_values():
    command, option, values = printed("bash", "-euc", TAB, "bash", *LINES).splitlines()
    assert command.split() == ["caption"]
    assert option.split() == ["--max-tokens"]
    assert set(values.split()) == {"short", "normal", "long"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_commands_options_and_values():
    script = "kestrel-grpc completion fish | source; for line in $argv; complete --do-complete $line; echo; end"
    command, option, values = printed("fish", "--no-config", "-c", script, *LINES).rstrip().split("\n\n")
    assert command.split()[0] == "caption"
    assert option.split()[0] == "--max-tokens"
    assert {line.split()[0] for line in values.splitlines()} == {"short", "normal", "long"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes_commands_and_values_in_a_terminal_without_other_settings(tmp_path: Path):
    (tmp_path / ".zshrc").write_text(ZSHRC)
    os.mkfifo(tmp_path / "told")
    told = os.open(tmp_path / "told", os.O_RDWR)
    terminal, shells_side = pty.openpty()
    shell = subprocess.Popen(
        ("zsh", "-o", "NO_GLOBAL_RCS", "-i"),
        cwd=CHECKOUT,
        env={**ACTIVATED, "ZDOTDIR": str(tmp_path), "TERM": "dumb"},
        stdin=shells_side,
        stdout=shells_side,
        stderr=shells_side,
        start_new_session=True,
    )
    try:
        read_until(terminal, b"ready> ")
        for line, completed in (
            ("kestrel-grpc cap", b"<kestrel-grpc caption >\n"),
            ("kestrel-grpc caption --length s", b"<kestrel-grpc caption --length short >\n"),
        ):
            os.write(terminal, f"{line}\t\x18".encode())
            assert read_until(told, b"\n") == completed
    finally:
        shell.kill()
        shell.wait()
        for descriptor in (terminal, shells_side, told):
            os.close(descriptor)


def read_until(descriptor: int, end: bytes) -> bytes:
    read = b""
    while end not in read:
        assert select.select([descriptor], [], [], LONGEST_S)[0], f"only {read!r} came"
        read += os.read(descriptor, 4096)
    return read
