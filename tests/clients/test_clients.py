"""The list of clients, its table in the documentation, and what an installation does without an index."""

import re

import pytest

from tests.clients import environments
from tests.clients.__main__ import MAX_SKIPPED
from tests.clients.catalogue import CLIENTS, PROGRAMS, Client
from tests.clients.matrix import Result, rows_of_page

ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows_of_page().values()]


def test_the_page_has_a_row_of_every_client_in_the_version_that_is_pinned():
    tried = {name: versions for name, versions, *_ in ROWS}
    in_matrix = [client for client in CLIENTS if client.in_matrix]
    assert list(tried) == [client.name for client in in_matrix], "run: make test-clients ALL=1"
    for client in in_matrix:
        pins = re.findall(r"(?:==|(?<=.)@)([\d.]+)$", "\n".join(client.arguments), re.MULTILINE)
        assert re.findall(r" ([\d.]+)(?=,|$)", tried[client.name])[: len(pins)] == pins, client.name


def test_every_row_of_the_page_has_passed_or_has_a_reason_and_few_were_skipped():
    skipped = [row for row in ROWS if row[-2].startswith("skipped: ")]
    assert all(row[-2] == "passed" and row[-3] for row in ROWS if row not in skipped)
    assert len(skipped) <= MAX_SKIPPED


def test_every_program_belongs_to_a_client():
    assert {path.name for path in PROGRAMS.iterdir() if path.is_file()} - {"__init__.py", "facts.py"} == {
        client.program for client in CLIENTS
    }


@pytest.mark.parametrize(
    ("argument", "package"),
    [
        ("openai==3.57.0", "openai"),
        ("grpclib[protobuf]==0.4.9", "grpclib"),
        ("@grpc/grpc-js@1.14.7", "@grpc/grpc-js"),
        ("ruby-grpc", "ruby-grpc"),
    ],
)
def test_the_newest_packages_are_those_without_versions(argument: str, package: str):
    client = Client("some", "some.py", ("--no-deps", argument))
    assert client.packages == (package,)
    assert client.newest() == ("--no-deps", re.sub(r"==.*|(?<=.)@[\d.]+$", "", argument))


def test_a_client_is_skipped_where_the_index_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("UV_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    with pytest.raises(environments.Unavailable, match="does not answer"):
        environments.install(Client("some", "some.py", ("openai==3.57.0",)), tmp_path / "some")
    assert not (tmp_path / "some" / "installed.json").exists()


def test_a_result_is_one_line():
    client = Client("some", "some.py", ())
    assert Result(client, "openai 3", ("text", "tools"), 3.4).line() == "some: passed, 2 checks in 3 s (openai 3)"
    assert Result(client, skipped="needs Debian").line().startswith("some: skipped: needs Debian, ")
