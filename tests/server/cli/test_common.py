"""What the commands share: the flags of connections to a server, and help that can be read."""

import argparse
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest

from kestrel_client.connection import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, ClientTls
from kestrel_client.requests import CachePolicy, Length, Priority
from kestrel_grpc.cli import ask, common
from kestrel_grpc.cli.commands import run
from kestrel_grpc.cli.common import EngineNotInstalled, add_connection_arguments, require_engine, tls_of
from kestrel_grpc.config.options import ServerConfig


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_connection_arguments(parser, address="here:1", address_help="where", timeout_s=7.0)
    return parser.parse_args(words)


def test_without_files_there_is_no_encryption():
    arguments = parsed()
    assert tls_of(arguments) is None
    assert (arguments.address, arguments.timeout) == ("here:1", 7.0)


def test_files_come_from_flags_or_from_the_environment(monkeypatch):
    files = ("--tls-ca", "a.pem", "--tls-client-certificate", "b.pem", "--tls-client-key", "c.key")
    expected = ClientTls(Path("a.pem"), Path("b.pem"), Path("c.key"))
    assert tls_of(parsed(*files)) == expected
    for name, value in (("CA", "a.pem"), ("CLIENT_CERTIFICATE", "b.pem"), ("CLIENT_KEY", "c.key")):
        monkeypatch.setenv(f"KESTREL_GRPC_TLS_{name}", value)
    assert tls_of(parsed()) == expected
    assert tls_of(parsed("--tls-ca", "d.pem")) == ClientTls(Path("d.pem"), Path("b.pem"), Path("c.key"))
    monkeypatch.setenv("KESTREL_GRPC_TLS_CA", "")
    assert tls_of(parsed()) == ClientTls(None, Path("b.pem"), Path("c.key"))


def test_the_server_does_not_take_these_variables_for_mistakes():
    names = (
        "KESTREL_GRPC_TLS_CA",
        "KESTREL_GRPC_TLS_CLIENT_CERTIFICATE",
        "KESTREL_GRPC_TLS_CLIENT_KEY",
        "KESTREL_GRPC_TOKEN",
    )
    assert ServerConfig.parse({}, dict.fromkeys(names, "x")) == ServerConfig()


def test_a_certificate_needs_its_key():
    with pytest.raises(ValueError, match="each needs the other"):
        tls_of(parsed("--tls-client-certificate", "b.pem"))


def test_every_help_text_is_filled_in(capsys: pytest.CaptureFixture[str]):
    run([])
    names = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert {"serve", "query", "batch", "evaluate", "bench"} <= set(names)
    for name in names:
        with suppress(SystemExit):
            run([name, "--help"])
        shown = capsys.readouterr().out
        assert shown.startswith("usage: ")
        assert [place for place in ("%%", "%(") if place in shown] == [], name


# In one process, so that nothing which one of them loads escapes.
HELP_OF_ALL = """
import contextlib, io, re, sys
from kestrel_grpc.__main__ import main

def help_of(*words):
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return printed.getvalue()

commands = re.findall(r"^    ([a-z]+) ", help_of(), re.MULTILINE)
assert all(f"kestrel-grpc {name}" in help_of(name) for name in commands)
print(len(commands), *sorted({"grpc", "google.protobuf", "numpy", "pydantic", "PIL", "torch"} & set(sys.modules)))
"""


def test_help_loads_no_large_library():
    done = subprocess.run((sys.executable, "-c", HELP_OF_ALL), capture_output=True, text=True, check=True)
    number, *loaded = done.stdout.split()
    assert (int(number) >= 20, loaded) == (True, [])


def test_flags_have_the_values_of_the_client():
    assert (common.DEFAULT_ADDRESS, common.DEFAULT_TIMEOUT_S) == (DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S)
    assert get_args(Length) == ask.LENGTHS
    assert get_args(CachePolicy) == ask.CACHE_POLICIES
    assert get_args(Priority) == ask.PRIORITIES


@pytest.mark.parametrize("missing", ["torch", "tokenizers", "safetensors", "llguidance", "huggingface_hub"])
def test_a_missing_library_of_the_engine_is_named(missing, monkeypatch):
    require_engine()
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(EngineNotInstalled, match=rf"{missing} is not installed: .*'kestrel-grpc\[server\]'"):
        require_engine()
