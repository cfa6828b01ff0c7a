"""Failures as gRPC writes them. `tests/server/calls/test_errors.py` has every row over the wire."""

from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from kestrel_grpc.calls.errors import Code, describe
from kestrel_grpc.frontends.grpc.status import status_code, trailing_metadata
from kestrel_runtime.api.errors import Overloaded, QueueTimeout


@pytest.mark.parametrize("code", Code)
def test_every_code_is_one_of_grpc(code: Code):
    assert grpc.StatusCode[code.name].value[0] == code.value


def test_trailers_have_code_message_and_the_name_of_the_request():
    failure = describe(Overloaded(7, 0.25))
    trailers: dict[str, Any] = dict(trailing_metadata(failure, "abc"))
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status_code(failure) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (status.code, status.message) == (8, failure.message)
    assert trailers["x-request-id"] == "abc"
    assert "grpc-retry-pushback-ms" not in trailers


def test_clients_that_retry_by_themselves_are_told_when():
    trailers = dict(trailing_metadata(describe(QueueTimeout(1.5)), "abc"))
    assert trailers["grpc-retry-pushback-ms"] == "1000"
