"""How the connection behaves, seen from the server."""

from __future__ import annotations

from google.rpc import code_pb2

from kestrel_client import Client
from kestrel_client._version import VERSION
from tests.client import canned
from tests.client.canned import CannedVision


def test_the_server_learns_which_client_calls(client: Client, vision: CannedVision) -> None:
    client.point(b"picture", "kite")
    assert str(vision.metadata[0]["user-agent"]).startswith(f"kestrel-client/{VERSION} ")


def test_a_call_with_a_large_image_is_repeated_too(client: Client, vision: CannedVision) -> None:
    vision.failures = [canned.status(code_pb2.UNAVAILABLE, "draining")]
    image = bytes(2 * 1024 * 1024)
    assert client.point(image, "kite").points
    assert [len(request.image.data) for request in vision.requests] == [len(image)] * 2


def test_an_answer_larger_than_the_default_limit_arrives(client: Client, vision: CannedVision) -> None:
    vision.answer_pieces = ("x" * 5 * 1024 * 1024,)
    assert len(client.complete_query(None, "q").answer) == 5 * 1024 * 1024
