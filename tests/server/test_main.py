"""The command: arguments in, exit status and lines out."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kestrel_grpc import __version__
from kestrel_grpc.__main__ import main
from tests import warm
from tests.reference_fixtures import CHECKOUT, MD2_SMALL, MD3_SMALL
from tests.server.serving import serving


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == __version__


def test_unusable_options_are_told_one_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KESTREL_GRPC_DEVICE", "tpu")
    assert main(["serve", "--port", "many", "--dtype", "int3"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("kestrel-grpc: ") for line in lines)


async def test_port_in_use_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]):
    async with serving() as rig:
        assert main(["serve", "--model", "/nowhere", "--port", str(rig.server.port)]) == 1
    error = capsys.readouterr().err
    assert "Address already in use" in error
    assert error.count("\n") == 1


def test_a_folder_of_adapters_that_is_not_there_is_told_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
):
    assert main(["serve", "--model", "/nowhere", "--adapters", "/nope", "--port", "0"]) == 2
    assert capsys.readouterr().err.splitlines() == ["kestrel-grpc: --adapters: there is no folder /nope"]


def test_model_that_is_not_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--model", "/nowhere", "--port", "0"]) == 1
    error = capsys.readouterr().err
    assert "/nowhere" in error
    assert error.count("\n") == 1


def test_a_cache_too_small_to_serve_with_is_one_clear_line(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--model", str(MD3_SMALL), "--port", "0", "--kv-pages", "1"]) == 1
    refusals = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kestrel-grpc: ")]
    assert len(refusals) == 1
    assert "47 pages are the least" in refusals[0]


@pytest.mark.parametrize("options", [[], ["--frontends", "1"]])
def test_a_checkpoint_that_cannot_be_served_ends_a_start_before_torch_is_imported(
    options: list[str], tmp_path: Path
):
    shutil.copytree(MD2_SMALL, tmp_path / "model")
    config = json.loads((MD2_SMALL / "config.json").read_text())
    config["text"]["n_layers"] = 10**30
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    code = (
        "import sys\n"
        "from kestrel_grpc.__main__ import main\n"
        "status = main(sys.argv[1:])\n"
        "sys.exit('torch is imported' if 'torch' in sys.modules else status)"
    )
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--model", str(tmp_path / "model"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    number = 10**30
    line = f"kestrel-grpc: model: config.json: text.n_layers is {number}, and must be at most 1024\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["serve", "--prot", "1"], "--prot: is no option of serve; did you mean --port?"),
        (["serve", "--max-quue=1"], "--max-quue: is no option of serve; did you mean --max-queue?"),
        (["query", "-", "q", "--tokn", "x"], "--tokn: is no option of query; did you mean --token?"),
        (["sevre"], "sevre: is no command; did you mean serve?"),
        (["config", "--zzzzzz"], "--zzzzzz: is no option of config"),
    ],
)
def test_a_mistyped_word_is_told_with_what_was_meant(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
):
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines() == [f"kestrel-grpc: {line}"]


@pytest.mark.parametrize("command", ["config", "serve --help", "--help"])
def test_a_reader_who_closes_the_pipe_sees_no_error(command: str):
    shell = ["bash", "-c", f"{sys.executable} -m kestrel_grpc {command} | head -1"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


@pytest.mark.parametrize("module", ["kestrel_grpc.cli.commands", "torch"])
def test_an_interrupt_while_a_library_is_being_imported_ends_quietly(module: str):
    """The import of a module presses Ctrl-C."""
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == sys.argv[1]: os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in background jobs of a shell
        "sys.meta_path.insert(0, Finder())\n"
        "from kestrel_grpc.__main__ import main\n"
        "sys.exit(main(['demo', '--draw', os.devnull]))"
    )
    done = subprocess.run([sys.executable, "-c", code, module], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("module", ["kestrel_grpc.cli.commands", "torch"])
def test_sigterm_while_a_server_imports_its_libraries_is_no_failure(module: str):
    """The import of a module sends it."""
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == sys.argv[-1]: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from kestrel_grpc.__main__ import main\n"
        "sys.exit(main(['serve', '--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", code, module], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command", ["demo", "serve --port 0", "verify tests/golden/md3-small"])
def test_an_interrupt_of_a_command_ends_quietly(command: str):
    words = [sys.executable, "-m", "kestrel_grpc", *command.split()]
    variables = {**os.environ, warm.EXITS_AS_USUAL: "yes"}
    with (
        warm.starts(),
        subprocess.Popen(
            words, cwd=CHECKOUT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()  # it has begun
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert process.returncode in (0, 130)
    assert "Traceback" not in errors
    assert "Exception" not in errors


@pytest.mark.parametrize("command", ["serve", "verify", "query", "segment", "info", "models", "load"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "usage: kestrel-grpc" in capsys.readouterr().out


def test_asking_a_server_does_not_load_the_model_libraries():
    code = "import sys; import kestrel_grpc.cli.commands; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "False"
