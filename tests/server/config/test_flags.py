"""Help, the documented table and `kestrel-grpc config` show every option."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kestrel_grpc.cli.commands import run
from kestrel_grpc.config.flags import FIRST_OPTIONS, effective_values, markdown_table
from kestrel_grpc.config.options import ServerConfig, options
from kestrel_grpc.config.sources import environment_name, flag_name
from kestrel_runtime.api.config import EngineConfig


def on_cpu(config: EngineConfig) -> str:
    return "cpu"


def printed_help(capsys: pytest.CaptureFixture[str], flag: str) -> str:
    with pytest.raises(SystemExit) as done:
        run(["serve", flag])
    assert not done.value.code
    return " ".join(capsys.readouterr().out.split())


def test_help_of_all_and_table_show_every_option(capsys: pytest.CaptureFixture[str]):
    shown = printed_help(capsys, "--help-all")
    table = markdown_table()
    found = list(options())
    for option in found:
        assert f"{flag_name(option.name)} " in shown
        assert f"`{flag_name(option.name)}` | `{environment_name(option.name)}` | {option.default_text} " in table
    assert len(table.splitlines()) == 2 + len(found)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_the_ten_options_that_are_needed_first(flag: str, capsys: pytest.CaptureFixture[str]):
    shown = printed_help(capsys, flag)
    described = {item.name for item in options() if f"{environment_name(item.name)})" in shown}
    assert described == FIRST_OPTIONS
    assert len(described) == 10
    assert f"{len(list(options())) - 10} more options: kestrel-grpc serve --help-all" in shown


def test_module_prints_the_table():
    printed = subprocess.run(
        [sys.executable, "-m", "kestrel_grpc.config.flags"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == markdown_table() + "\n"


def test_effective_values_name_their_sources_and_make_a_file(tmp_path: Path):
    file = tmp_path / "kestrel.toml"
    file.write_text('model = "m"\nport = 1\nmax_queue = 3\ntracing = true\n')
    flags: dict[str, str | None] = {
        "config": str(file),
        "page_size": "8",
        "host": None,
        "kernels": "resample=reference",
        "adapter_repositories": "org/name,Org/Other",
    }
    environment = {"KESTREL_GRPC_PORT": "2", "KESTREL_GRPC_REVISION": 'a "b"', "HOME": "/root"}
    printed = effective_values(flags, environment, on_cpu)
    sources = dict(re.findall(r"^(\w+) = .*? # (.*)$", printed, re.MULTILINE))
    assert sources["model"] == f"{file}: model"
    assert (sources["port"], sources["page_size"], sources["host"]) == (
        "KESTREL_GRPC_PORT",
        "--page-size",
        "default",
    )
    again = tmp_path / "again.toml"
    again.write_text(printed)
    read = ServerConfig.parse({"config": str(again)}, {})
    assert read == replace(ServerConfig.parse(flags, environment), config=str(again))
    assert (read.port, read.engine.max_queued_requests, read.engine.revision) == (2, 3, 'a "b"')


def test_effective_values_say_what_the_device_and_the_precision_decide():
    flags: dict[str, str | None] = {"max_queue": "1", "precision": "float8", "vision_backend": "fused"}
    lines = effective_values(flags, {}, on_cpu)
    sources = dict(re.findall(r"^(?:# )?(\w+) = .*? # (.*)$", lines, re.MULTILINE))
    assert sources["device"] == "default; here cpu"
    assert sources["dtype"] == "default; here float32"
    assert "# max_batch_size = 16 " in lines
    assert "# cuda_graphs = false " in lines
    assert sources["max_batch_size"] == "default on this device"
    assert sources["kv_pages"].startswith("default; known when the model is loaded")
    assert sources["max_queue"] == "--max-queue"
    assert sources["text_backend"] == "default; here fused-float8"
    assert sources["vision_backend"] == "--vision-backend"
