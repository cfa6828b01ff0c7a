"""NVIDIA's Python client against our frontend for Triton: calls, streams, asyncio, shared memory, examples."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import queue
import re
import secrets
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton  # installed in an environment of its own
import tritonclient.grpc.aio as triton_aio  # the same
from tritonclient import utils  # the same
from tritonclient.utils import shared_memory  # the same

FACTS = json.loads(sys.argv[1])
IMAGE = Path(FACTS["picture"]).read_bytes()
DOCUMENT = Path(FACTS["picture"]).parents[1] / "docs" / "triton.md"
MESSAGES = Path(FACTS["picture"]).parent / "frontends" / "triton" / "v2" / "grpc_service_pb2.py"
FINAL = "triton_final_response"
ASKED: dict[str, Any] = {
    "SKILL": "query",
    "QUESTION": "What is in this image?",
    "IMAGE": IMAGE,
    "TEMPERATURE": 0.0,
    "MAX_TOKENS": 16,
}
KINDS: dict[type, tuple[str, Any]] = {
    bytes: ("BYTES", np.object_),
    str: ("BYTES", np.object_),
    bool: ("BOOL", np.bool_),
    int: ("INT32", np.int32),
    float: ("FP32", np.float32),
}
TIMEOUT_S = 120


class Bearer(triton.InferenceServerClientPlugin):
    """Adds a token to every call."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: Any) -> None:
        request.headers["authorization"] = f"Bearer {self._token}"


def client_of(name: str) -> Any:
    """A client with a token."""
    client = triton.InferenceServerClient(FACTS["grpc"])
    client.register_plugin(Bearer(FACTS[name]))
    return client


def inputs(**values: Any) -> list[Any]:
    """Inputs of one element each, by their names."""
    made: list[Any] = []
    for name, value in values.items():
        datatype, kind = KINDS[type(value)]
        made.append(triton.InferInput(name, [1], datatype))
        made[-1].set_data_from_numpy(np.array([value], dtype=kind))
    return made


def facts(result: Any) -> dict[str, Any]:
    return json.loads(result.as_numpy("TEXT_OUTPUT")[0].decode())


def is_final(result: Any) -> bool:
    return result.get_response().parameters[FINAL].bool_param


def failure(call: Callable[[], Any]) -> Any:
    """What a call fails with."""
    try:
        call()
    except utils.InferenceServerException as error:
        return error
    raise AssertionError("the call did not fail")


def collect(client: Any, send: Callable[[], None], count: int, **options: Any) -> list[tuple[Any, Any]]:
    """Results and errors of `count` requests of one stream."""
    got: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: got.put((result, error)), **options)
    send()
    found: list[tuple[Any, Any]] = []
    while count:
        found.append(got.get(timeout=TIMEOUT_S))
        result, error = found[-1]
        count -= error is not None or is_final(result)
    client.stop_stream()
    return found


def check_contract() -> None:
    """Our contract has the names, numbers and types of the client's, and both work in one process."""
    spec = importlib.util.spec_from_file_location("ours", MESSAGES)
    assert spec is not None
    assert spec.loader is not None
    ours = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ours)
    num_fields = 0
    for file in (triton.service_pb2, triton.model_config_pb2):
        for name, theirs in file.DESCRIPTOR.message_types_by_name.items():
            if name in ours.DESCRIPTOR.message_types_by_name:
                num_fields += compare(ours.DESCRIPTOR.message_types_by_name[name], theirs)
    assert num_fields > 100, num_fields
    (service,) = ours.DESCRIPTOR.services_by_name.values()
    (known,) = triton.service_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods:
        theirs = known.methods_by_name[method.name]
        assert (method.input_type.full_name, method.output_type.full_name) == (
            theirs.input_type.full_name,
            theirs.output_type.full_name,
        )


def compare(ours: Any, theirs: Any) -> int:
    """How many fields our message has, all of which the client's has too."""
    for field in ours.fields:
        known = theirs.fields_by_number[field.number]
        assert (field.name, field.type, field.is_repeated) == (known.name, known.type, known.is_repeated), (
            field.name
        )
    nested = ours.nested_types_by_name
    return len(ours.fields) + sum(compare(nested[name], theirs.nested_types_by_name[name]) for name in nested)


def check_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("moondream")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata().name == "kestrel-grpc"
    metadata = client.get_model_metadata("moondream", as_json=True)
    assert [item["name"] for item in metadata["outputs"]] == ["TEXT_OUTPUT"]
    assert client.get_model_config("moondream").config.model_transaction_policy.decoupled
    assert client.get_model_repository_index().models[0].state == "READY"


def check_calls(client: Any) -> str:
    result = client.infer("moondream", inputs(**ASKED), request_id="one", priority=1, timeout=120_000_000)
    assert result.get_response().id == "one"
    answer = facts(result)["answer"]
    done: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.async_infer("moondream", inputs(**ASKED), callback=lambda result, error: done.put((result, error)))
    result, error = done.get(timeout=TIMEOUT_S)
    assert error is None
    assert facts(result)["answer"] == answer
    return answer


def check_streams(client: Any, answer: str) -> None:
    def send() -> None:
        for index in range(8):
            streams = {"STREAM": True} if index % 2 else {}
            client.async_stream_infer("moondream", inputs(**ASKED, **streams), request_id=f"{index}")

    found = collect(client, send, 8)
    assert not [error for _, error in found if error]
    for index in range(8):
        mine = [facts(result) for result, _ in found if result.get_response().id == f"{index}"]
        assert mine[-1]["answer"] == answer
        if index % 2:
            assert len(mine) > 1
            assert "".join(item["chunk"] for item in mine) == answer

    def send_with_empty_end() -> None:
        client.async_stream_infer("moondream", inputs(**ASKED), enable_empty_final_response=True, request_id="e")

    assert [is_final(result) for result, _ in collect(client, send_with_empty_end, 1)] == [False, True]


def check_errors(client: Any, operator: Any) -> None:
    def wrong() -> None:
        client.async_stream_infer("moondream", inputs(**{**ASKED, "QUESTION": ""}))

    ((_, error),) = collect(client, wrong, 1)
    assert error.message() == "QUESTION: must not be empty"
    ((_, error),) = collect(client, wrong, 1, headers={"triton_grpc_error": "true"})
    assert error.status() == "StatusCode.INVALID_ARGUMENT", error
    error = failure(lambda: client.infer("other", inputs(**ASKED)))
    assert error.status() == "StatusCode.NOT_FOUND"
    assert error.message().startswith("Request for unknown model: 'other'")
    for call in (lambda: operator.load_model("moondream"), operator.get_trace_settings, operator.get_log_settings):
        assert failure(call).status() == "StatusCode.UNIMPLEMENTED"
    with triton.InferenceServerClient(FACTS["grpc"]) as stranger:
        assert stranger.is_server_ready()
        assert (
            failure(lambda: stranger.infer("moondream", inputs(**ASKED))).status() == "StatusCode.UNAUTHENTICATED"
        )


def check_statistics(operator: Any) -> None:
    (stats,) = operator.get_inference_statistics("moondream").model_stats
    assert stats.inference_count >= 2
    assert stats.inference_stats.compute_infer.ns > 0


def check_cancellation(client: Any) -> None:
    long = {**ASKED, "MAX_TOKENS": 512}
    done: queue.Queue[tuple[Any, Any]] = queue.Queue()
    call = client.async_infer("moondream", inputs(**long), callback=lambda result, error: done.put((result, error)))
    call.cancel()
    _, error = done.get(timeout=TIMEOUT_S)
    assert error is not None
    client.start_stream(callback=lambda result, error: None)
    client.async_stream_infer("moondream", inputs(**long, STREAM=True))
    client.stop_stream(cancel_requests=True)


def check_shared_memory(client: Any, answer: str) -> None:
    key, num_bytes = f"/kestrel-{secrets.token_hex(8)}", len(IMAGE) + 4
    elements = utils.serialize_byte_tensor(np.array([IMAGE], dtype=np.object_)).item()
    handle = shared_memory.create_shared_memory_region("image", key, num_bytes)
    try:
        shared_memory.set_shared_memory_region(handle, [np.frombuffer(elements, dtype=np.uint8)])
        client.register_system_shared_memory("image", key, num_bytes)
        assert client.get_system_shared_memory_status().regions["image"].byte_size == num_bytes
        image = triton.InferInput("IMAGE", [1], "BYTES")
        image.set_shared_memory("image", num_bytes)
        others = {name: value for name, value in ASKED.items() if name != "IMAGE"}
        assert facts(client.infer("moondream", [image, *inputs(**others)]))["answer"] == answer
        client.unregister_system_shared_memory("image")
    finally:
        shared_memory.destroy_shared_memory_region(handle)


async def check_asyncio(answer: str) -> None:
    async with triton_aio.InferenceServerClient(FACTS["grpc"]) as client:
        client.register_plugin(Bearer(FACTS["alice"]))
        results = await asyncio.gather(*(client.infer("moondream", inputs(**ASKED)) for _ in range(4)))
        assert {facts(result)["answer"] for result in results} == {answer}

        async def requests() -> Any:
            for index in range(4):
                asked = inputs(**ASKED, STREAM=True)
                yield {"model_name": "moondream", "inputs": asked, "request_id": f"{index}"}

        whole: dict[str, str] = {}
        async for result, error in client.stream_infer(requests()):
            assert error is None
            name = result.get_response().id
            whole[name] = whole.get(name, "") + facts(result)["chunk"]
        assert whole == {f"{index}": answer for index in range(4)}


def check_example() -> None:
    """The example of the documentation, with another address."""
    text = DOCUMENT.read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    block = block.replace("localhost:8001", FACTS["open"]).replace(
        "kestrel_grpc/demo_picture.png", FACTS["picture"]
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # a line of ours is the name of a check
        exec(block, {})
    assert printed.getvalue()


def check_client_of_kestrel() -> None:
    """What the client that Kestrel documents for its own backend does, with another address."""
    client = triton.InferenceServerClient(FACTS["open"])

    def infer(asked: list[Any]) -> list[Any]:
        chunks: list[Any] = []
        done = threading.Event()

        def callback(result: Any, error: Any) -> None:
            if error:
                raise RuntimeError(error)
            data = json.loads(result.as_numpy("TEXT_OUTPUT")[0].decode("utf-8"))
            chunks.append(data)
            if data.get("completed", True):
                done.set()

        client.start_stream(callback=callback)
        client.async_stream_infer("moondream", asked)
        assert done.wait(TIMEOUT_S)
        client.stop_stream()
        return chunks

    assert isinstance(infer(inputs(SKILL="query", QUESTION="What?", IMAGE=IMAGE))[0]["answer"], str)
    chunks = infer(inputs(SKILL="caption", IMAGE=IMAGE, STREAM=True))
    assert "".join(chunk["chunk"] for chunk in chunks) == chunks[-1]["caption"]
    boxes = infer(inputs(SKILL="detect", OBJECT="shape", IMAGE=IMAGE))[0]["objects"]
    assert boxes
    assert all(box.keys() == {"x_min", "y_min", "x_max", "y_max", "score"} for box in boxes)
    points = infer(inputs(SKILL="point", OBJECT="shape", IMAGE=IMAGE))[0]["points"]
    assert points
    assert all(point.keys() == {"x", "y", "score"} for point in points)


def main() -> None:
    client, operator = client_of("alice"), client_of("operator")
    check_contract()
    check_metadata(client)
    print("contract and metadata")
    answer = check_calls(client)
    assert "star" in answer, answer
    print("calls")
    check_streams(client, answer)
    print("streams")
    check_errors(client, operator)
    check_statistics(operator)
    print("errors and statistics")
    check_cancellation(client)
    print("cancellation")
    check_shared_memory(client, answer)
    print("shared memory")
    asyncio.run(check_asyncio(answer))
    print("asyncio")
    check_example()
    check_client_of_kestrel()
    print("examples")
    client.close()
    operator.close()


if __name__ == "__main__":
    main()
