"""The command: arguments in, exit status and lines out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kestrel_grpc import __version__
from kestrel_grpc.__main__ import main
from tests.reference_fixtures import MD3_SMALL
from tests.server.serving import serving


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == __version__


def test_unusable_options_are_told_one_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KESTREL_GRPC_DEVICE", "tpu")
    assert main(["serve", "--port", "many", "--dtype", "int3"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("kestrel-grpc: ") for line in lines)


async def test_port_in_use_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as rig:
        assert main(["serve", "--model", "/nowhere", "--port", str(rig.server.port)]) == 1
    error = capsys.readouterr().err
    assert "Address already in use" in error
    assert error.count("\n") == 1


def test_model_that_is_not_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "/nowhere", "--port", "0"]) == 1
    error = capsys.readouterr().err
    assert "/nowhere" in error
    assert error.count("\n") == 1


def test_a_cache_too_small_to_serve_with_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", str(MD3_SMALL), "--port", "0", "--kv-pages", "1"]) == 1
    refusals = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kestrel-grpc: ")]
    assert len(refusals) == 1
    assert "47 pages are the least" in refusals[0]


def test_no_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "verify", "query", "caption", "point", "detect", "segment"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "usage: kestrel-grpc" in capsys.readouterr().out


def test_asking_a_server_does_not_load_the_model_libraries() -> None:
    code = "import sys; from kestrel_grpc.__main__ import main; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "False"
