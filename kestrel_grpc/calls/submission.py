"""Submits the request of a call to the engine: fetches its image, sets deadline and tenant, cancels at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType, TracebackType
from typing import TypeVar

from msgspec import structs

from kestrel_grpc.calls.call_context import CallContext, RequestSummary
from kestrel_grpc.calls.errors import CallFailure, describe
from kestrel_grpc.calls.message_gate import TooManyCalls
from kestrel_grpc.images.image_store import ImageStore
from kestrel_grpc.images.image_uris import ImageSource, is_embedded
from kestrel_grpc.images.stored_images import ImageHandle, ImageNotFound, ImageReference, ImageUri
from kestrel_runtime.api.adapters import AdapterName
from kestrel_runtime.api.engine import Engine
from kestrel_runtime.api.errors import InvalidRequest, KestrelError, ModelNotFound, did_you_mean
from kestrel_runtime.api.events import Event, Finished, FinishReason, FoundObject, Started, Usage
from kestrel_runtime.api.images import Image
from kestrel_runtime.api.requests import Embed, Request, locate
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.fairness.fair_limit import FairLimit

Rendered = TypeVar("Rendered")

_MAX_PATCHES_AT_ONCE = 8
"""The most streams of the embeddings of patches: each holds up to 6 MiB until its caller has read it."""
_DEFAULT_MODEL_NAMES = ("moondream3-preview",)
"""The names that Moondream's client sends for a caller who names no model. Each stands for the served model."""
_PUBLISHED_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "moondream2": ("moondream2", "moondream-2B", "vikhyatk/moondream2"),
        "moondream3": ("moondream3.1-9B-A2B", "moondream/moondream3.1-9B-A2B", "moondream/moondream3-preview"),
    }
)
"""The names under which the makers publish the models of an architecture; each stands for a served one."""


@dataclass(frozen=True, slots=True)
class ObjectAnswer:
    """Holds the answer about one of several objects, or the failure in place of it."""

    object: str
    finished: Finished | None
    failure: CallFailure | None = None


class Submission:
    """Submits the requests of all calls. Raises the errors of the image source and the image store."""

    def __init__(
        self,
        engine: Engine,
        images: ImageSource,
        store: ImageStore | None = None,
        *,
        model_names: Collection[str] = (),
    ) -> None:
        """Creates a submission. With `store` None no images are stored. `model_names` are further names of the
        served model."""
        self._engine = engine
        self._model_names = (*model_names, *_DEFAULT_MODEL_NAMES)
        self._images = images
        self._store = store
        self._large_answers = asyncio.Lock()
        self._patches = FairLimit(_MAX_PATCHES_AT_ONCE)

    async def submit(
        self, request: Request, references: Sequence[ImageReference | None], call: CallContext
    ) -> Stream:
        """Returns the events of a request. `references` has an item for each image of the request: the name of the
        image if the request has only a placeholder, else None.

        A stored image is read now: the request keeps its bytes even if the stored image is deleted afterwards. When
        this returns, only the engine refers to the images, apart from the store and the caller.
        """
        (stream,) = await self.submit_samples(request, references, call)
        return stream

    async def submit_samples(
        self, request: Request, references: Sequence[ImageReference | None], call: CallContext
    ) -> list[Stream]:
        """Returns one stream of events for each sample or object that the request asks for; otherwise like
        `submit`.

        Each object counts as a request towards the limits of the call's token. The streams raise the errors of the
        engine; if its queue refuses one of them, none runs.
        """
        request = await self._with_adapter(request)
        if call.max_priority is not request.options.max_priority:
            request = replace(request, options=replace(request.options, max_priority=call.max_priority))
        call.request = RequestSummary(request)
        if isinstance(request, Embed) and request.patches:
            self._count_patches(call.principal)
        if any(references):
            request = await self._with_images(request, references, call)
            call.request = RequestSummary(request)
        if (num_objects := len(request.objects)) > 1:
            await call.count_further(num_objects - 1)
        streams = self._engine.submit_samples(
            request,
            deadline=call.deadline,
            tenant=call.principal,
            namespace=call.namespace,
            route=call.route,
        )
        call.release()
        return streams

    async def answers_by_object(
        self, objects: Sequence[str], streams: Sequence[Stream], call: CallContext
    ) -> list[ObjectAnswer]:
        """Waits for the end of all streams, one for each object, and returns their answers in this order.

        Raises the error of the first object if none has an answer.
        """
        outcomes: list[Finished | KestrelError] = []
        with ending_with(*streams):
            for stream in streams:
                try:
                    outcomes.append(await stream.result())
                except KestrelError as error:
                    outcomes.append(error)
        return self._by_object(objects, outcomes, call)

    async def events_by_object(
        self, objects: Sequence[str], streams: Sequence[Stream], call: CallContext
    ) -> AsyncGenerator[tuple[int, Started | FoundObject] | list[ObjectAnswer], None]:
        """Yields the first `Started` of all streams, one for each object, then what is found with the index of its
        object, and last the answers that `answers_by_object` returns.

        Raises the error of the first object if none has an answer. Closing the generator cancels the requests.
        """
        outcomes: dict[int, Finished | KestrelError] = {}
        has_started = False
        with ending_with(*streams):
            async with aclosing(numbered(streams)) as events:
                async for index, event in events:
                    if isinstance(event, Finished | KestrelError):
                        outcomes[index] = event
                    elif isinstance(event, FoundObject):
                        yield index, event
                    elif isinstance(event, Started) and not has_started:
                        has_started = True
                        yield index, event
        yield self._by_object(objects, [outcomes[index] for index in range(len(objects))], call)

    def _by_object(
        self, objects: Sequence[str], outcomes: Sequence[Finished | KestrelError], call: CallContext
    ) -> list[ObjectAnswer]:
        answers: list[ObjectAnswer] = []
        for index, (name, outcome) in enumerate(zip(objects, outcomes, strict=True)):
            if isinstance(outcome, Finished):
                answers.append(ObjectAnswer(name, outcome))
                continue
            if isinstance(outcome, InvalidRequest):
                outcome.rename(lambda field, index=index: f"objects[{index}]" if field == "object" else field)
            answers.append(ObjectAnswer(name, None, describe(outcome, self._engine.status)))
        given = [outcome for outcome in outcomes if isinstance(outcome, Finished)]
        if not given:
            raise next(outcome for outcome in outcomes if isinstance(outcome, KestrelError))
        call.finished = _joined_answers(given)
        return answers

    async def answers_of(
        self,
        requests: Sequence[Request],
        references: Sequence[ImageReference | None],
        field_name: Callable[[int, str], str],
        call: CallContext,
    ) -> list[Finished]:
        """Submits requests about one image each, and returns the answers in their order.

        Each counts as a request towards the limits of the call's token. Raises the first error, after it has
        cancelled all; `field_name` converts the name of a field of the request at a place to its name in the body.
        """
        if len(requests) > 1:
            await call.count_further(len(requests) - 1)
        streams: list[Stream] = []
        answers: list[Finished] = []
        try:
            for place, (request, reference) in enumerate(zip(requests, references, strict=True)):
                with naming(partial(field_name, place)):
                    streams.append(await self.submit(request, (reference,), call))
            for place, stream in enumerate(streams):
                with naming(partial(field_name, place)):
                    answers.append(await stream.result())
        finally:
            for stream in streams:
                stream.cancel()
        call.finished = _joined_answers(answers)
        return answers

    async def rendered(self, finished: Finished, render: Callable[[], Rendered]) -> Rendered:
        """Returns the answer that `render` makes.

        Renders large answers in a thread, one after the other, so that the event loop serves other calls meanwhile.
        """
        if not finished.is_large:
            return render()
        async with self._large_answers:
            return await asyncio.to_thread(render)

    def _count_patches(self, principal: str) -> None:
        """Counts a stream of the embeddings of patches until its call ends. Raises `TooManyCalls`."""
        if not self._patches.take(principal):
            limit = f"all of the {self._patches.limit} streams of embeddings that may be open"
            raise TooManyCalls(f"{limit}, or this caller's share")
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._patches.give_back(principal))

    async def adapter_of(self, model: str) -> str:
        """Returns the adapter of requests that name this model; "" for the served model itself.

        An adapter is named as `model/name@step` or `name@step`. Raises `ModelNotFound` if there is no such adapter.
        """
        adapter, _ = self._split(model)
        return await self._listed(adapter, model) if adapter else ""

    def _split(self, model: str) -> tuple[str, bool]:
        """Splits the name of a model: returns the adapter's name, and whether the served model's name precedes
        it."""
        info = self._engine.info
        names = ("", *self._model_names, info.model, *_PUBLISHED_NAMES.get(info.architecture, ()))
        if model in names:
            return "", True
        found = (model.removeprefix(f"{name}/") for name in names if name and model.startswith(f"{name}/"))
        adapter = next(found, "")
        return adapter or model, adapter != ""

    async def _listed(self, adapter: str, model: str) -> str:
        names = await self._engine.adapter_names()
        # Requests may name any revision of a repository; only the repository itself is listed.
        if adapter not in names and adapter.partition("@")[0] not in names:
            raise ModelNotFound(model, did_you_mean(model, (self._engine.info.model, *names)))
        return adapter

    async def _with_adapter(self, request: Request) -> Request:
        """Returns the request with the served model, and the adapter that its model names. Raises
        `ModelNotFound`."""
        options, served = request.options, self._engine.info.model
        if options.model in ("", served):
            return request
        adapter, is_sure = self._split(options.model)
        if not is_sure:
            await self._listed(adapter, options.model)
        if adapter and (options.adapter not in ("", adapter) or AdapterName.parse(adapter) is None):
            raise ModelNotFound(options.model)
        return replace(request, options=replace(options, model=served, adapter=adapter or options.adapter))

    async def _with_images(
        self, request: Request, references: Sequence[ImageReference | None], call: CallContext
    ) -> Request:
        """Returns the request with the images that are named.

        Raises the error of the first that is missing, with the violations of all.
        """
        images = list(request.images)
        for place, reference in enumerate(references):
            if isinstance(reference, ImageHandle):
                images[place] = await self._stored(reference, call)
        uris = {place: item.uri for place, item in enumerate(references) if isinstance(item, ImageUri)}
        if not uris:
            return request.with_images(tuple(images))
        # The engine admits the request to its queue before anything is fetched.
        request = request.with_images(tuple(images))
        if len(uris) == len(images) and not any(map(is_embedded, uris.values())):
            call.release()
        async with self._engine.expecting(request, deadline=call.deadline, tenant=call.principal):
            fetches = (self._images.fetch(uri, call.principal) for uri in uris.values())
            fetched = await asyncio.gather(*fetches, return_exceptions=True)
        failures: list[BaseException] = []
        for place, found in zip(uris, fetched, strict=True):
            if isinstance(found, bytes):
                images[place] = found
                continue
            if isinstance(found, InvalidRequest):
                locate(found, request, place)
            failures.append(found)
        if failures:
            raise _joined(failures)
        return request.with_images(tuple(images))

    async def _stored(self, handle: ImageHandle, call: CallContext) -> Image:
        if self._store is None:
            raise ImageNotFound(handle)
        stored = await self._store.find(call.namespace, handle)
        return await self._store.read(call.namespace, stored)


def _joined_answers(answers: Sequence[Finished]) -> Finished:
    """Returns the first answer with the others as its alternatives: with the tokens of all, prompts included, and
    with the first reason to end that is not the model's."""
    first, *others = answers
    usages = [answer.usage for answer in answers]
    usage = Usage(
        num_input_tokens=sum(usage.num_input_tokens for usage in usages),
        num_image_tokens=sum(usage.num_image_tokens for usage in usages),
        num_output_tokens=sum(usage.num_output_tokens for usage in usages),
        num_cached_tokens=sum(usage.num_cached_tokens for usage in usages),
    )
    reasons = (answer.finish_reason for answer in answers)
    reason = next((reason for reason in reasons if reason is not FinishReason.STOP), FinishReason.STOP)
    return structs.replace(first, usage=usage, finish_reason=reason, alternatives=tuple(others))


def _joined(failures: Sequence[BaseException]) -> BaseException:
    """Returns the first error that is no violation, or else the first one with the violations of all."""
    others = [error for error in failures if not isinstance(error, InvalidRequest)]
    if others:
        return others[0]
    first, *_ = invalid = [error for error in failures if isinstance(error, InvalidRequest)]
    first.violations = tuple(item for error in invalid for item in error.violations)
    return first


class naming(AbstractContextManager[None]):  # noqa: N801 - used as a function
    """Renames the fields in an `InvalidRequest` of the block to their names in the message or the body."""

    def __init__(self, field_name: Callable[[str], str]) -> None:
        self._field_name = field_name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, InvalidRequest):
            error.rename(self._field_name)


async def last_event(streams: Sequence[Stream], call: CallContext) -> Finished:
    """Waits for the end of all samples of a request; returns the first with the others as its alternatives."""
    with ending_with(*streams):
        first, *others = [await stream.result() for stream in streams]
        call.finished = with_alternatives(first, others)
        return call.finished


def with_alternatives(first: Finished, others: Sequence[Finished]) -> Finished:
    """Returns the first sample with the others as its alternatives. The prompt is counted once."""
    if not others:
        return first
    num_output_tokens = sum(finished.usage.num_output_tokens for finished in (first, *others))
    usage = structs.replace(first.usage, num_output_tokens=num_output_tokens)
    return structs.replace(first, usage=usage, alternatives=tuple(others))


async def numbered(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Event | KestrelError], None]:
    """Yields the events of all streams in the order of their arrival, each with the number of its stream.

    An error of a stream is its last item: it is not raised, and ends no other stream.
    """
    if len(streams) == 1:  # saves a task for each event
        try:
            async for event in streams[0]:
                yield 0, event
        except KestrelError as error:
            yield 0, error
        return
    iterators = [aiter(stream) for stream in streams]
    waiting = {asyncio.ensure_future(anext(iterator)): number for number, iterator in enumerate(iterators)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number = waiting.pop(task)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                except KestrelError as error:
                    yield number, error
                    continue
                waiting[asyncio.ensure_future(anext(iterators[number]))] = number
                yield number, event
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@contextmanager
def ending_with(*streams: Stream) -> Iterator[None]:
    """Cancels the requests when the block ends, however it ends. A finished request is left alone."""
    try:
        yield
    finally:
        for stream in streams:
            stream.cancel()
