"""A few seconds of what `make fuzz` does for as long as one likes."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel_client.v1.engine_service_pb2 import UploadAdapterRequest
from tests.fuzzing import UNHURRIED
from tests.fuzzing.adapter_uploads import upload, uploads
from tests.fuzzing.frames import Target, conversations
from tests.fuzzing.images import decode, images
from tests.fuzzing.infer_requests import infer, infer_requests
from tests.fuzzing.requests import PARSERS, methods, parse, requests

# Where an example fails it is shown, however large.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
    pytest.mark.usefixtures("warm_starts"),
]
MIB = 2**20
anyhow = settings(suppress_health_check=UNHURRIED)
asked = st.sampled_from(methods()).flatmap(lambda method: st.tuples(st.just(method), requests(method)))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target.running() as running:
        for _ in range(50):  # what it keeps for good, it has by then
            running.assert_well()
        yield running


def test_every_call_has_its_parser():
    assert sorted(PARSERS) == methods()


@settings(anyhow, max_examples=300)
@given(images)
def test_any_bytes_are_a_picture_or_are_refused_as_documented(data: bytes):
    decode(data)


@settings(anyhow, max_examples=150)
@given(asked)
def test_any_message_is_a_request_or_is_refused_as_documented(call: tuple[str, bytes]):
    parse(*call)


@settings(anyhow, max_examples=150)
@given(infer_requests)
def test_any_message_to_triton_is_a_request_or_is_refused_as_documented(data: bytes):
    infer(data)


@settings(anyhow, max_examples=100)
@given(uploads)
def test_any_upload_of_an_adapter_is_whole_and_good_or_changes_nothing(parts: list[UploadAdapterRequest]):
    upload(parts)


@settings(anyhow, max_examples=100)
@given(conversations)
def test_no_conversation_holds_a_connection_open(target: Target, said: bytes):
    target.hear(said)


def test_after_all_that_the_server_answers_and_is_no_larger(target: Target):
    before_bytes = target.server.rss_bytes

    @settings(anyhow, max_examples=50)
    @given(conversations)
    def speak(said: bytes) -> None:
        target.hear(said)

    speak()
    target.assert_well()
    assert target.server.rss_bytes < before_bytes + 64 * MIB
