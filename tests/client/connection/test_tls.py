"""The files that an encrypted connection is made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from kestrel_client.connection.tls import ClientTls
from tests.server.certificates import Pair


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    pair = Pair.within(tmp_path)
    pair.write(trustme.CA())
    return pair


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


def test_files_come_from_arguments_or_from_the_environment() -> None:
    environment = {"KESTREL_GRPC_TLS_CA": "a.pem"}
    assert ClientTls.named(None, None, None, environment) == ClientTls(Path("a.pem"))
    assert ClientTls.named(Path("b.pem"), None, None, environment) == ClientTls(Path("b.pem"))
    assert ClientTls.named("", None, None, environment) is None
    assert ClientTls.named(None, None, None, {}) is None
