import os
from pathlib import Path

import pytest

from kestrel_grpc.access.limits import TokenLimit
from kestrel_grpc.access.token_file import Scope, TokenFileError, hash_of, line_for, new_secret, read_tokens

HASH = "ab" * 32


def read(tmp_path: Path, text: str):
    path = tmp_path / "tokens.toml"
    path.write_text(text, encoding="utf-8")
    return read_tokens(path)


def test_a_line_that_was_made_for_a_secret_lets_it_in(tmp_path):
    secret = new_secret()
    tokens = read(tmp_path, line_for("alice", secret, frozenset({Scope.ADMIN, Scope.INFER})))
    token = tokens[hash_of(secret)]
    assert token.name == "alice"
    assert token.scopes == {Scope.ADMIN, Scope.INFER}
    assert token.limit is None


def test_a_line_does_not_hold_the_secret():
    secret = new_secret()
    assert secret not in line_for("alice", secret, frozenset({Scope.INFER}))


def test_no_two_secrets_are_the_same():
    assert new_secret() != new_secret()


def test_limits_are_read(tmp_path):
    line = f'bob = {{ sha256 = "{HASH}", scopes = ["infer"], rate = 2.5, burst = 7, concurrency = 3 }}'
    (token,) = read(tmp_path, line).values()
    assert token.limit == TokenLimit("bob", bytes.fromhex(HASH), 2.5, 7, 3)


@pytest.mark.parametrize(("rate", "burst"), [("0.2", 1), ("2.5", 3), ("10", 10)])
def test_by_default_a_seconds_worth_may_come_at_once(tmp_path, rate, burst):
    (token,) = read(tmp_path, f'bob = {{ sha256 = "{HASH}", scopes = ["infer"], rate = {rate} }}').values()
    assert token.limit is not None
    assert token.limit.burst == burst


@pytest.mark.parametrize("text", ["", "# nothing so far\n"])
def test_a_file_without_tokens_is_refused(tmp_path, text):
    with pytest.raises(TokenFileError, match=r"tokens\.toml: holds no tokens; `kestrel-grpc token new NAME`"):
        read(tmp_path, text)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "tokens.toml")
    with pytest.raises(TokenFileError, match=r"cannot read .*tokens\.toml: not a regular file"):
        read_tokens(tmp_path / "tokens.toml")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ('"secret"', "must be like"),
        (f'{{ sha265 = "{HASH}", scopes = ["infer"] }}', "no setting is named sha265; did you mean sha256?"),
        ('{ sha256 = "secret", scopes = ["infer"] }', "64 hexadecimal digits"),
        (f'{{ sha256 = "{HASH.upper()}", scopes = ["infer"] }}', "in lower case"),
        (f'{{ sha256 = "{HASH}" }}', "a list of infer, images, admin"),
        (f'{{ sha256 = "{HASH}", scopes = [] }}', "a list of infer, images, admin"),
        (f'{{ sha256 = "{HASH}", scopes = "infer" }}', "a list of infer, images, admin"),
        (f'{{ sha256 = "{HASH}", scopes = ["root"] }}', "a list of infer, images, admin"),
        (f'{{ sha256 = "{HASH}", scopes = [["infer"]] }}', "a list of infer, images, admin"),
        (f'{{ sha256 = "{HASH}", scopes = ["infer"], rate = 0 }}', "above 0"),
        (f'{{ sha256 = "{HASH}", scopes = ["infer"], rate = nan }}', "above 0"),
        (f'{{ sha256 = "{HASH}", scopes = ["infer"], rate = true }}', "above 0"),
        (f'{{ sha256 = "{HASH}", scopes = ["infer"], rate = 1, burst = 0 }}', "burst must be a whole number"),
        (f'{{ sha256 = "{HASH}", scopes = ["infer"], burst = 3 }}', "burst needs a rate"),
        (
            f'{{ sha256 = "{HASH}", scopes = ["infer"], max_priority = "urgent" }}',
            "max_priority must be one of interactive, normal, batch",
        ),
        (f'{{ sha256 = "{HASH}", scopes = ["infer"], concurrency = 1.5 }}', "concurrency must be a whole number"),
        (f'{{ sha256 = "{HASH}", scopes = ["infer"], namespace = "a b" }}', "namespace must be 1 to 64 letters"),
        (f'{{ sha256 = "{HASH}", scopes = ["infer"], namespace = 1 }}', "namespace must be 1 to 64 letters"),
    ],
)
def test_a_bad_line_is_named_with_its_problem(tmp_path, settings, problem):
    with pytest.raises(TokenFileError, match=r"tokens\.toml: alice: ") as caught:
        read(tmp_path, f"alice = {settings}")
    assert problem in str(caught.value)


def test_every_problem_is_told_at_once(tmp_path):
    with pytest.raises(TokenFileError) as caught:
        read(tmp_path, f'a = 1\nb = {{ sha256 = "{HASH}", scopes = [], rate = -1 }}\n"c d" = 2')
    told = str(caught.value).removeprefix(f"{tmp_path / 'tokens.toml'}: ")
    assert [part.split(": ")[0] for part in told.split("; ")] == ["a", "b", "b", "c d", "c d"]


def test_two_lines_with_the_same_token_are_refused(tmp_path):
    line = f'{{ sha256 = "{HASH}", scopes = ["infer"] }}'
    with pytest.raises(TokenFileError, match="b: is the same token as a"):
        read(tmp_path, f"a = {line}\nb = {line}")


def test_what_is_not_toml_is_refused(tmp_path):
    with pytest.raises(TokenFileError):
        read(tmp_path, "alice: secret")


def test_what_is_not_text_is_refused(tmp_path):
    (tmp_path / "tokens.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenFileError):
        read_tokens(tmp_path / "tokens.toml")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TokenFileError, match=r"cannot read .*tokens\.toml: No such file"):
        read_tokens(tmp_path / "tokens.toml")


@pytest.mark.parametrize("name", ["", "a b", "ü", "a" * 65, 'a"'])
def test_no_line_is_made_for_a_name_that_cannot_stand_there(name):
    with pytest.raises(ValueError, match="a name is"):
        line_for(name, "secret", frozenset({Scope.INFER}))


def test_a_token_shares_its_namespace_only_where_both_lines_say_so(tmp_path):
    text = "\n".join(
        f'{name} = {{ sha256 = "{number:064x}", scopes = ["infer"]{more} }}'
        for number, (name, more) in enumerate(
            [("alice", ""), ("bob", ', namespace = "alice"'), ("carol", ', namespace = "alice"'), ("dave", "")]
        )
    )
    found = {token.name: token.namespace for token in read(tmp_path, text).values()}
    assert found["bob"] == found["carol"]
    assert len(set(found.values())) == 3
