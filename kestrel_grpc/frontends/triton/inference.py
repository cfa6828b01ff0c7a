"""Implements `ModelInfer` and `ModelStreamInfer`: requests to the model, one in a call or many in a stream."""

# ruff: noqa: N802 (methods bear the names of their RPCs)

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial

from kestrel_grpc.calls.call_admission import CallAdmission, CallFailed
from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.errors import Unsupported
from kestrel_grpc.calls.submission import Submission, ending_with, last_event
from kestrel_grpc.frontends.triton.parsing import infer_request, wants_empty_final
from kestrel_grpc.frontends.triton.rendering import ResponseRenderer, to_triton
from kestrel_grpc.frontends.triton.shared_memory import SharedMemory
from kestrel_grpc.frontends.triton.statistics import Statistics
from kestrel_grpc.frontends.triton.tensors import ReadRegion
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_runtime.api.events import Finished, TextDelta

# Callers that send this key want the stream to end with the status of a failure.
_STRICT_KEY = "triton_grpc_error"
# The most responses of one stream that wait to be written. At the limit requests wait, and their text is joined.
_MAX_WAITING_RESPONSES = 32
_Message = wire.ModelStreamInferResponse


class Inference:
    """Implements the two methods. Each request of a stream is a call of its own, admitted by `requests`.

    `served` is the engine's name of the model. While `is_crowded` returns True, a stream reads its next request
    only when all of its requests have ended.
    """

    def __init__(
        self,
        submission: Submission,
        requests: CallAdmission,
        memory: SharedMemory,
        is_crowded: Callable[[], bool],
        served: str,
        statistics: Statistics,
    ) -> None:
        self.is_crowded = is_crowded
        self._submission = submission
        self._memory = memory
        self._requests = requests
        self._served = served
        self._statistics = statistics

    async def ModelInfer(self, message: wire.ModelInferRequest, call: CallContext) -> wire.ModelInferResponse:
        render = ResponseRenderer(message)
        wanted = await infer_request(message, self._served, self._reader(call))
        if wanted.streams:
            raise Unsupported(
                "ModelInfer RPC doesn't support models with decoupled transaction policy: use STREAM "
                "with ModelStreamInfer"
            )
        _limit(call, wanted.timeout_s)
        with self._statistics.counting(call):
            stream = await self._submission.submit(wanted.request, (), call)
            del message, wanted
            return render.answer(await last_event([stream], call), call.request_id)

    def ModelStreamInfer(
        self, messages: AsyncIterator[wire.ModelInferRequest], call: CallContext
    ) -> AsyncGenerator[_Message, None]:
        return _RequestStream(self, call).responses(messages)

    async def serve(
        self, message: wire.ModelInferRequest, stream_call: CallContext, index: int, out: _Responses
    ) -> None:
        """Serves one request of a stream, in a task of its own."""
        render, has_empty_final = ResponseRenderer(message), wants_empty_final(message)
        call = self._requests.begin(stream_call.headers, stream_call.deadline, stream_call.method, stream_call.peer)
        call.request_id = f"{stream_call.request_id}-{index}"
        try:
            async with self._requests.admit(call):
                wanted = await infer_request(message, self._served, self._reader(call))
                _limit(call, wanted.timeout_s)
                with self._statistics.counting(call):
                    stream, streams = await self._submission.submit(wanted.request, (), call), wanted.streams
                    del message, wanted
                    out.mark_taken(index)
                    with ending_with(stream):
                        if streams:
                            async for event in stream:
                                if isinstance(event, TextDelta):
                                    await out.put(render.piece(event))
                                elif isinstance(event, Finished):
                                    call.finished = event
                        else:
                            call.finished = await stream.result()
                    assert call.finished is not None, "a stream ends with it"
                    await out.put(
                        render.last(call.finished, call.request_id, streams=streams, is_final=not has_empty_final)
                    )
                    if has_empty_final:
                        await out.put(render.empty())
        except BaseException as error:
            failure = self._requests.fail(call, error)
            if failure is None:
                raise
            failure = to_triton(failure)
            await out.put(CallFailed(failure) if out.is_strict else render.error(failure.message))
            return
        finally:
            out.mark_taken(index)
        self._requests.succeed(call)

    def _reader(self, call: CallContext) -> ReadRegion:
        """Reads the caller's regions of shared memory."""
        return partial(self._memory.read, call)


class _Responses:
    """Queues the responses to the requests of a stream, in the order in which they become available."""

    def __init__(self, *, is_strict: bool) -> None:
        self.is_strict = is_strict
        self._queue: asyncio.Queue[_Message | Exception | None] = asyncio.Queue(_MAX_WAITING_RESPONSES)
        self._taken: dict[int, asyncio.Event] = {}

    async def put(self, response: _Message | Exception | None) -> None:
        """Adds a response, an error that ends the stream, or None for the end. Waits while the queue is full."""
        await self._queue.put(response)

    async def get(self) -> _Message | Exception | None:
        """Returns the next item. Waits until there is one."""
        return await self._queue.get()

    async def wait_until_taken(self, index: int) -> None:
        """Waits until the engine has the request, so that its message is held no longer."""
        self._taken[index] = asyncio.Event()
        await self._taken[index].wait()

    def mark_taken(self, index: int) -> None:
        """Records that the engine has the request, or that the request has failed."""
        event = self._taken.pop(index, None)
        if event is not None:
            event.set()


class _RequestStream:
    """Runs one call of `ModelStreamInfer`: reads requests while others run."""

    def __init__(self, inference: Inference, call: CallContext) -> None:
        self._inference = inference
        self._call = call
        is_strict = any(key == _STRICT_KEY and value == "true" for key, value in call.headers)
        self._out = _Responses(is_strict=is_strict)
        self._requests: set[asyncio.Task[None]] = set()

    async def responses(self, messages: AsyncIterator[wire.ModelInferRequest]) -> AsyncGenerator[_Message, None]:
        """Yields the responses of all requests. If the caller leaves, requests that still run are cancelled."""
        reading = asyncio.create_task(self._read(messages))
        try:
            while (item := await self._out.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            running = (reading, *self._requests)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _read(self, messages: AsyncIterator[wire.ModelInferRequest]) -> None:
        """Starts a task for each request. The next one is read when the engine has the previous one, so that a
        stream holds one message at a time."""
        end: Exception | None = None
        index = 0
        try:
            async for message in messages:
                task = asyncio.create_task(self._inference.serve(message, self._call, index, self._out))
                del message
                self._requests.add(task)
                task.add_done_callback(self._requests.discard)
                await self._out.wait_until_taken(index)
                index += 1
                while self._requests and self._inference.is_crowded():
                    await asyncio.wait(tuple(self._requests), return_when=asyncio.FIRST_COMPLETED)
        except Exception as error:
            end = error
        if self._requests:
            await asyncio.wait(tuple(self._requests))
        await self._out.put(end)


def _limit(call: CallContext, timeout_s: float | None) -> None:
    """Brings the deadline forward to the timeout of the request."""
    if timeout_s is not None:
        timeout = call.arrived + timeout_s
        call.deadline = timeout if call.deadline is None else min(call.deadline, timeout)
