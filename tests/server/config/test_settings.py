from pathlib import Path

import pytest

from kestrel_grpc.config.settings import Setting, collect

NAMES = ("config", "port", "max_queue", "image_hosts")


def settings(flags=None, environment=None, problems=None) -> dict[str, Setting]:
    told: list[str] = []
    found = collect(NAMES, flags or {}, environment or {}, told)
    if problems is None:
        assert told == []
    else:
        problems += told
    return found


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kestrel.toml"
    path.write_text(text)
    return str(path)


def test_the_first_source_that_has_a_value_wins(tmp_path):
    file = write(tmp_path, "port = 3\nmax_queue = 3")
    flags = {"config": file, "port": "1"}
    environment = {"KESTREL_GRPC_PORT": "2", "KESTREL_GRPC_MAX_QUEUE": "2"}
    assert settings(flags, environment)["port"] == Setting("1", "--port")
    assert settings({"config": file}, environment)["port"] == Setting("2", "KESTREL_GRPC_PORT")
    assert settings({"config": file})["port"] == Setting("3", f"{file}: port")
    assert "port" not in settings()


def test_the_environment_may_name_the_file(tmp_path):
    file = write(tmp_path, "port = 3")
    assert settings(environment={"KESTREL_GRPC_CONFIG": file})["port"].text == "3"


def test_an_unset_flag_is_no_value():
    assert settings({"port": None}) == {}


@pytest.mark.parametrize(
    ("value", "text"),
    [('"a"', "a"), ("5", "5"), ("0.5", "0.5"), ("true", "on"), ("false", "off"), ('["a", "b"]', "a,b")],
)
def test_values_of_the_file_read_as_on_the_command_line(tmp_path, value, text):
    assert settings({"config": write(tmp_path, f"port = {value}")})["port"].text == text


def test_unknown_keys_are_told_with_what_was_meant(tmp_path):
    file = write(tmp_path, 'prot = 3\n"max-queue" = 3\nzzz = 1\nconfig = "other.toml"')
    problems: list[str] = []
    settings({"config": file}, {"KESTREL_GRPC_PROT": "1"}, problems)
    assert problems == [
        f"{file}: prot: is no option; did you mean port?",
        f"{file}: max-queue: is no option; did you mean max_queue?",
        f"{file}: zzz: is no option",
        f"{file}: config: is no option",
    ]


@pytest.mark.parametrize("value", ["{ a = 1 }", "2026-01-01", "[1, 2]", "[[1]]"])
def test_values_that_no_option_takes_are_told(tmp_path, value):
    problems: list[str] = []
    settings({"config": write(tmp_path, f"port = {value}")}, problems=problems)
    assert [problem.rpartition(": ")[2] for problem in problems] == [
        "must be a text, a number, true or false, or a list of texts"
    ]


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    problems: list[str] = []
    settings({"config": str(tmp_path / "none.toml")}, problems=problems)
    settings({"config": write(tmp_path, "port: 1")}, problems=problems)
    assert problems[0] == f"{tmp_path / 'none.toml'}: No such file or directory"
    assert problems[1].startswith(f"{tmp_path / 'kestrel.toml'}: ")
