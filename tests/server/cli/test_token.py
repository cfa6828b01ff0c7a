"""`kestrel-grpc token`: what it prints, and what is in the file afterwards."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kestrel_grpc.__main__ import main
from kestrel_grpc.access.token_file import Scope, hash_of, read_tokens


def run(*arguments: str | Path) -> int:
    try:
        return main(["token", *map(str, arguments)])
    except SystemExit as stop:  # argparse
        return int(stop.code or 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


def test_a_token_is_made_listed_and_revoked(path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("new", "alice", "--file", path, "--expires", "2999-01-31") == 0
    printed = capsys.readouterr()
    secret = printed.out.strip()
    token = read_tokens(path)[hash_of(secret)]
    assert (token.name, token.scopes) == ("alice", {Scope.INFER, Scope.IMAGES})
    assert token.expires_at == datetime(2999, 1, 31, tzinfo=UTC)
    assert secret not in path.read_text() + printed.err
    assert run("new", "bob", "--file", path, "--scope", "admin") == 0
    capsys.readouterr()
    assert run("list", "--file", path) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["token", "alice", "bob"]
    assert "2999-01-31T00:00:00+00:00  yes" in table[1]
    assert run("revoke", "alice", "--file", path) == 0
    assert [token.name for token in read_tokens(path).values()] == ["bob"]


def test_a_list_says_which_tokens_have_expired(path: Path, capsys: pytest.CaptureFixture[str]):
    path.write_text(
        f'old = {{ sha256 = "{"ab" * 32}", scopes = ["infer"], rate = 2, expires = 2020-01-31T12:00:00+02:00 }}'
    )
    assert run("list", "--file", path, "--json") == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["token"], facts["is_valid"], facts["expires"]) == ("old", False, "2020-01-31T10:00:00+00:00")
    assert (facts["rate"], facts["concurrency"]) == (2, None)


def test_without_a_file_the_line_is_printed(capsys: pytest.CaptureFixture[str], path: Path):
    assert run("new", "alice", "--expires", "2999-01-31T12:00:00Z") == 0
    printed = capsys.readouterr()
    path.write_text(printed.err)
    assert read_tokens(path)[hash_of(printed.out.strip())].expires_at == datetime(2999, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        (("new", "alice", "--expires", "2020-01-31"), 2, "'2020-01-31' has passed"),
        (("new", "alice", "--expires", "soon"), 2, "'soon' is no date"),
        (("new", "alice", "--expires", "2999-01-31T12:00:00"), 2, "2999-01-31T12:00:00Z"),
        (("new", "alice", "--expires", "9999-12-31T23:00:00-14:00", "--file", "FILE"), 1, "expires must be a date"),
        (("new", "a b"), 2, "a name is"),
        (("revoke", "alice", "--file", "FILE"), 1, "No such file"),
        (("list", "--file", "FILE"), 1, "No such file"),
        (("revoke", "alice"), 2, "--file"),
    ],
)
def test_mistakes_are_one_line(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, problem: str
):
    assert run(*(path if item == "FILE" else item for item in arguments)) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert problem in printed.err
    assert not path.exists()
