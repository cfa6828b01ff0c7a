"""Environment variables that set no option."""

from __future__ import annotations

import pytest

from kestrel_grpc.config.environment import environment_warnings, former_names, security_problems
from kestrel_grpc.config.options import ConfigurationError, ServerConfig, options

NAMES = [name for name, _ in options()]


def test_an_unknown_variable_with_our_prefix_is_a_warning_that_says_what_was_meant():
    environment = {
        "KESTREL_GRPC_SERVICE_HOST": "10.0.0.1",
        "KESTREL_GRPC_PROT": "1",
        "KESTREL_GRPC_PORT": "1",
        "KESTREL_GRPC_TOKEN": "of a client",
        "PROT": "1",
    }
    assert ServerConfig.parse({}, environment) == ServerConfig(port=1)
    service, mistyped = environment_warnings(NAMES, environment)
    assert service.startswith("KESTREL_GRPC_SERVICE_HOST: is no variable of this server")
    assert mistyped == "KESTREL_GRPC_PROT: is no variable of this server; did you mean KESTREL_GRPC_PORT?"


@pytest.mark.parametrize("variable", ["KESTREL_GRPC_TOKNES", "KESTREL_GRPC_TLS_CLIENT_CAS", "KESTREL_GRPC_HOSTS"])
def test_a_mistyped_variable_that_concerns_security_stops_the_start(variable):
    with pytest.raises(ConfigurationError, match=f"^{variable}: is no variable of this server; did you mean"):
        ServerConfig.parse({}, {variable: "x"})
    assert list(environment_warnings(NAMES, {variable: "x"})) == []


@pytest.mark.parametrize(
    "variable",
    ["KESTREL_TOKENS", "KESTREL_HOST", "KESTREL_TLS_CERTIFICATE", "KESTREL_TLS_KEY", "KESTREL_TLS_CLIENT_CA"],
)
def test_a_former_name_that_concerns_security_stops_the_start(variable):
    with pytest.raises(ConfigurationError) as caught:
        ServerConfig.parse({}, {variable: "x"})
    now = variable.replace("KESTREL_", "KESTREL_GRPC_")
    assert caught.value.problems == (f"{variable}: is not read; its name is now {now}",)


def test_every_option_of_access_is_an_option():
    former = {"KESTREL_" + name.upper(): "x" for name in NAMES}
    told = list(security_problems(NAMES, former))
    assert len(told) > 10
    assert {line.rpartition(" ")[2].removeprefix("KESTREL_GRPC_").lower() for line in told} <= set(NAMES)


def test_variables_of_the_engine_named_kestrel_are_left_alone():
    foreign = {"KESTREL_MODEL": "moondream3", "KESTREL_PORT": "tcp://10.0.0.1:80", "KESTREL_CACHE": "1"}
    assert ServerConfig.parse({}, foreign) == ServerConfig()
    assert list(environment_warnings(NAMES, foreign)) == []
    assert list(former_names(["tokens"], foreign)) == []
