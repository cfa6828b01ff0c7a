"""Tokens are added and removed, and every other line stays as it was."""

import os
import stat
import threading
from pathlib import Path

import pytest

from kestrel_grpc.access.token_edits import add_token, remove_token
from kestrel_grpc.access.token_file import Scope, TokenFileError, line_for, read_tokens

A, B, C = ("aa" * 32, "bb" * 32, "cc" * 32)
BOTH = f'''# Tokens of the shop.

# Alice asked for it in May.
alice = {{ sha256 = "{A}", scopes = ["infer"] }}  # until June
bob = {{ sha256 = "{B}", scopes = ["infer"], rate = 2 }}
'''
TABLES = f'''[alice]  # hers
sha256 = "{A}"
scopes = [
    "infer",
]

# Bob's.
[bob]
sha256 = "{B}"
scopes = ["infer"]
'''


def new(name: str) -> str:
    return line_for(name, name, frozenset((Scope.INFER,)))


def names(path: Path) -> list[str]:
    return sorted(token.name for token in read_tokens(path).values())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


@pytest.mark.parametrize("text", [BOTH, BOTH.rstrip(), TABLES, BOTH.replace("\n", "\r\n"), "# none yet\n", ""])
def test_a_token_is_added_and_the_rest_stays_as_it_was(path: Path, text: str):
    path.write_bytes(text.encode())
    before = names(path) if "sha256" in text else []
    add_token(path, "carol", new("carol"))
    assert names(path) == [*before, "carol"]
    assert path.read_bytes().decode().replace(new("carol"), "").split() == text.split()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (BOTH, BOTH.replace(BOTH.splitlines()[3] + "\n", "")),
        (TABLES, TABLES[TABLES.index("\n# Bob") :]),
        (f'"alice".sha256 = "{A}"\nalice.scopes = ["infer"]\n{new("bob")}', new("bob")),
        (f'alice = {{ sha256 = "{A}", scopes = [\n "infer",\n "admin"] }}\n{new("bob")}\n', new("bob") + "\n"),
        (f"{new('alice')}\n{new('alice2')}\n{new('malice')}", f"{new('alice2')}\n{new('malice')}"),
    ],
    ids=["lines", "tables", "dotted", "several lines", "similar names"],
)
def test_a_token_is_removed_and_the_rest_stays_as_it_was(path: Path, text: str, left: str):
    path.write_text(text)
    remove_token(path, "alice")
    assert path.read_text() == left
    assert "alice" not in names(path)


def test_a_file_that_is_missing_is_made_for_its_owner_alone(path: Path):
    assert add_token(path, "alice", new("alice")) is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names(path) == ["alice"]


def test_a_file_that_others_could_read_is_closed_and_its_former_mode_is_returned(path: Path):
    path.write_text(BOTH)
    path.chmod(0o644)
    assert add_token(path, "carol", new("carol")) == 0o644
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert remove_token(path, "carol") is None


def test_a_link_stays_a_link(path: Path, tmp_path: Path):
    (tmp_path / "real.toml").write_text(BOTH)
    path.symlink_to("real.toml")
    remove_token(path, "bob")
    assert path.is_symlink()
    assert names(path) == ["alice"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOTH, "has a token named alice already"),
        ("carol = 1", "carol: must be like"),
        ("[", "Invalid"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_changed_stays_as_it_was(path: Path, text: str | None, problem: str):
    if text is None:
        path = path / "missing" / "tokens.toml"
    else:
        path.write_text(text)
    with pytest.raises(TokenFileError, match=problem):
        add_token(path, "alice", new("alice"))
    assert text is None or path.read_text() == text


@pytest.mark.parametrize(
    ("name", "problem"),
    [("alise", "has no token named alise; did you mean alice"), ("alice", "alice is its only token")],
)
def test_a_token_that_cannot_be_removed_is_named(path: Path, name: str, problem: str):
    path.write_text(new("alice"))
    with pytest.raises(TokenFileError, match=problem):
        remove_token(path, name)
    assert path.read_text() == new("alice")


def test_no_token_is_lost_when_several_are_added_at_the_same_time(path: Path):
    threads = [threading.Thread(target=add_token, args=(path, f"t{i}", new(f"t{i}"))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(path) == [f"t{i}" for i in range(8)]
