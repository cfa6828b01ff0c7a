"""Adds tokens to the file of tokens and removes them, without a change of other lines and of comments.

Two commands at the same time change the file one after the other. A server that reads meanwhile sees the former
file or the new one as a whole.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kestrel_grpc.access.reloaded_files import read_regular_file
from kestrel_grpc.access.token_file import Token, TokenFileError, parse_tokens
from kestrel_runtime.api.errors import did_you_mean

MODE = 0o600
_TABLE = re.compile(r"\s*\[")
_MAX_LINES = 64
"""The most lines of one value, such as a list of scopes with one on each line."""


def add_token(path: Path, name: str, line: str) -> int | None:
    """Adds the line of a token to a file, which is created if it is missing.

    Returns the former mode of the file if others could read it, else None. Raises `TokenFileError`.
    """

    def edited(text: str) -> str:
        if _named(parse_tokens(text), name):
            raise ValueError(f"has a token named {name} already; `kestrel-grpc token revoke` removes it")
        wanted = {**tomllib.loads(text), **tomllib.loads(line)}
        return _first_valid(_with_line(text, line), wanted, f"cannot add {name}: add the line by hand")

    return _rewrite(path, edited, creates=True)


def remove_token(path: Path, name: str) -> int | None:
    """Removes a token from a file. Returns as `add_token`. Raises `TokenFileError`."""

    def edited(text: str) -> str:
        tokens = parse_tokens(text)
        if not _named(tokens, name):
            raise ValueError(f"has no token named {name}{did_you_mean(name, _names(tokens))}")
        if len(tokens) == 1:
            raise ValueError(
                f"{name} is its only token, and a server does not accept a file without tokens, so that {name} "
                "would stay valid: add another first, or stop the server and delete the file"
            )
        wanted = {key: value for key, value in tomllib.loads(text).items() if key != name}
        return _first_valid(_without(text, name), wanted, f"cannot remove {name}: remove its lines by hand")

    return _rewrite(path, edited, creates=False)


def _names(tokens: Mapping[bytes, Token]) -> list[str]:
    return [token.name for token in tokens.values()]


def _named(tokens: Mapping[bytes, Token], name: str) -> bool:
    return name in _names(tokens)


def _first_valid(texts: Iterator[str], wanted: Mapping[str, Any], problem: str) -> str:
    """Returns the first text that holds exactly the wanted tokens. Raises `ValueError` if there is none."""
    for text in texts:
        try:
            if tomllib.loads(text) == wanted:
                return text
        except ValueError:
            continue
    raise ValueError(problem)


def _with_line(text: str, line: str) -> Iterator[str]:
    """Yields the text with a further line: at its end, or before a table, to which a last line would belong."""
    yield text + ("" if not text or text.endswith("\n") else "\n") + f"{line}\n"
    lines = text.splitlines(keepends=True)
    for index, found in enumerate(lines):
        if _TABLE.match(found):
            yield "".join((*lines[:index], f"{line}\n", *lines[index:]))


def _without(text: str, name: str) -> Iterator[str]:
    """Yields texts that lack lines of a token: a line that may continue, a table, or lines with its settings."""
    lines = text.splitlines(keepends=True)
    key = rf"\s*[\"']?{re.escape(name)}[\"']?\s*"
    first = re.compile(rf"{key}=")
    for index, found in enumerate(lines):
        if first.match(found):
            for end in range(index + 1, min(index + _MAX_LINES, len(lines)) + 1):
                yield "".join((*lines[:index], *lines[end:]))
    # Comments that follow a table stay, since they may be about the next one.
    header = re.compile(rf"\s*\[{key}\]")
    for index, found in enumerate(lines):
        if header.match(found):
            end = next((at for at in range(index + 1, len(lines)) if _TABLE.match(lines[at])), len(lines))
            while end > index + 1 and lines[end - 1].lstrip()[:1] in ("", "#"):
                end -= 1
            yield "".join((*lines[:index], *lines[end:]))
    setting = re.compile(rf"{key}\.")
    yield "".join(line for line in lines if not setting.match(line))


def _rewrite(path: Path, edited: Callable[[str], str], *, creates: bool) -> int | None:
    """Replaces a file by the result of `edited`, at once, with mode 0600 and its former owner."""
    target = Path(os.path.realpath(path))  # a link stays a link
    try:
        with _locked(target.parent):
            try:
                text, status = read_regular_file(target).decode(), os.stat(target)
            except FileNotFoundError:
                if not creates:
                    raise
                text, status = "", None
            new = edited(text)
            parse_tokens(new)
            _replace(target, new.encode(), status)
    except OSError as error:
        raise TokenFileError(f"cannot change {path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, not TOML, or not of tokens
        raise TokenFileError(f"{path}: {error}") from error
    mode = MODE if status is None else stat.S_IMODE(status.st_mode)
    return mode if mode & ~MODE else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other commands from changing files of a folder meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(target: Path, data: bytes, former: os.stat_result | None) -> None:
    """Writes a file under another name, and renames it once it is on the disk."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # with mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if former is not None and (former.st_uid, former.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), former.st_uid, former.st_gid)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
