"""The texts of options: precedence of their sources, and environment variables that set no option."""

from pathlib import Path

import pytest

from kestrel_grpc.config.options import ConfigurationError, ServerConfig, option_names
from kestrel_grpc.config.sources import ACCESS_OPTIONS, Setting, collect, environment_warnings

NAMES = ("config", "port", "max_queue", "image_hosts")
OPTIONS = option_names()


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


def test_an_unknown_variable_with_our_prefix_is_a_warning_that_says_what_was_meant():
    environment = {
        "KESTREL_GRPC_SERVICE_HOST": "10.0.0.1",
        "KESTREL_GRPC_PROT": "1",
        "KESTREL_GRPC_PORT": "1",
        "KESTREL_GRPC_TOKEN": "of a client",
        "PROT": "1",
    }
    assert ServerConfig.parse({}, environment) == ServerConfig(port=1)
    service, mistyped = environment_warnings(OPTIONS, environment)
    assert service.startswith("KESTREL_GRPC_SERVICE_HOST: is no variable of this server")
    assert mistyped == "KESTREL_GRPC_PROT: is no variable of this server; did you mean KESTREL_GRPC_PORT?"


@pytest.mark.parametrize("variable", ["KESTREL_GRPC_TOKNES", "KESTREL_GRPC_TLS_CLIENT_CAS", "KESTREL_GRPC_HOSTS"])
def test_a_mistyped_variable_that_concerns_security_stops_the_start(variable):
    with pytest.raises(ConfigurationError, match=f"^{variable}: is no variable of this server; did you mean"):
        ServerConfig.parse({}, {variable: "x"})
    assert list(environment_warnings(OPTIONS, {variable: "x"})) == []


def test_every_option_of_access_is_an_option():
    assert set(ACCESS_OPTIONS) <= set(OPTIONS)


def test_variables_of_the_engine_named_kestrel_are_left_alone():
    foreign = {
        "KESTREL_TOKENS": "x",
        "KESTREL_MODEL": "moondream3",
        "KESTREL_PORT": "tcp://10.0.0.1:80",
        "KESTREL_CACHE": "1",
    }
    assert ServerConfig.parse({}, foreign) == ServerConfig()
    assert list(environment_warnings(OPTIONS, foreign)) == []
