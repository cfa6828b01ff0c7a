"""What the commands share: the flags of connections to a server, and help that can be read."""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from pathlib import Path

import pytest

from kestrel_client.connection import ClientTls
from kestrel_grpc.cli.commands import run
from kestrel_grpc.cli.common import add_connection_arguments, tls_of
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
