"""The files that an encrypted connection is made from."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import trustme

from kestrel_grpc.cli.connection import ClientTls, add_connection_arguments, tls_of
from kestrel_grpc.config.options import ServerConfig
from tests.server.certificates import Pair


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    pair = Pair.within(tmp_path)
    pair.write(trustme.CA())
    return pair


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


@pytest.mark.parametrize("name", ["TOKEN", "TLS_CA", "TLS_CLIENT_CERTIFICATE", "TLS_CLIENT_KEY"])
def test_a_former_name_of_a_variable_is_refused_with_the_name_of_now(monkeypatch, name):
    monkeypatch.setenv(f"KESTREL_{name}", "x")
    with pytest.raises(ValueError, match=f"^KESTREL_{name}: .* KESTREL_GRPC_{name}$"):
        tls_of(parsed())


def test_a_certificate_needs_its_key():
    with pytest.raises(ValueError, match="each needs the other"):
        tls_of(parsed("--tls-client-certificate", "b.pem"))


def test_files_that_cannot_be_used_are_named(tmp_path, pair):
    other = Pair.within(tmp_path / "other")
    other.key.parent.mkdir()
    other.write(trustme.CA())
    for ca in (pair.key, tmp_path / "binary"):
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match=f"{ca} holds no certificates in PEM format"):
            ClientTls(ca, None, None).credentials()
    for key in (other.key, pair.certificate):
        with pytest.raises(ValueError, match=f"{pair.certificate} and {key} are not a certificate and its unenc"):
            ClientTls(None, pair.certificate, key).credentials()
    missing = tmp_path / "missing"
    for tls in (ClientTls(missing, None, None), ClientTls(None, pair.certificate, missing)):
        with pytest.raises(FileNotFoundError) as caught:
            tls.credentials()
        assert caught.value.filename == str(missing)


def test_another_name_is_asked_for_only_where_it_is_given(pair):
    assert ClientTls(pair.certificate, None, None).channel_options() == ()
    named = ClientTls(pair.certificate, None, None, server_name="kestrel")
    assert named.channel_options() == (("grpc.ssl_target_name_override", "kestrel"),)
