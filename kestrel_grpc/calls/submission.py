"""Submits the request of a call to the engine: fetches its image, sets deadline and tenant, cancels at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from kestrel_grpc.calls.call_context import CallContext, RequestSummary
from kestrel_grpc.images.image_store import ImageStore
from kestrel_grpc.images.image_uris import ImageSource, is_embedded
from kestrel_grpc.images.stored_images import ImageNotFound, ImageReference, ImageUri
from kestrel_runtime.api.adapters import AdapterName
from kestrel_runtime.api.engine import Engine
from kestrel_runtime.api.errors import ModelNotFound, did_you_mean
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Request
from kestrel_runtime.api.stream import Stream

Rendered = TypeVar("Rendered")

_DEFAULT_MODEL_NAMES = ("moondream3-preview",)
"""The names that Moondream's client sends for a caller who names no model. Each stands for the served model."""
_PUBLISHED_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "moondream2": ("moondream2", "moondream-2B", "vikhyatk/moondream2"),
        "moondream3": ("moondream3.1-9B-A2B", "moondream/moondream3.1-9B-A2B", "moondream/moondream3-preview"),
    }
)
"""The names under which the makers publish the models of an architecture; each stands for a served one."""


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

    async def submit(self, request: Request, image: ImageReference | None, call: CallContext) -> Stream:
        """Returns the events of a request. If `image` is given, the request's image is only a placeholder.

        A stored image is read now: the request keeps its bytes even if the stored image is deleted afterwards. When
        this returns, only the engine refers to the image, apart from the store and the caller.
        """
        (stream,) = await self.submit_samples(request, image, call)
        return stream

    async def submit_samples(
        self, request: Request, image: ImageReference | None, call: CallContext
    ) -> list[Stream]:
        """Returns one stream of events for each sample that the request asks for; otherwise like `submit`.

        The streams raise the errors of the engine; if it refuses one of the samples, none runs.
        """
        request = await self._with_adapter(request)
        if call.max_priority is not request.options.max_priority:
            request = replace(request, options=replace(request.options, max_priority=call.max_priority))
        call.request = RequestSummary(request)
        if image is not None:
            request = await self._with_image(request, image, call)
            call.request = RequestSummary(request)
        streams = self._engine.submit_samples(
            request, deadline=call.deadline, tenant=call.principal, namespace=call.namespace
        )
        call.release()
        return streams

    async def rendered(self, finished: Finished, render: Callable[[], Rendered]) -> Rendered:
        """Returns the answer that `render` makes.

        Renders large answers in a thread, one after the other, so that the event loop serves other calls meanwhile.
        """
        if not finished.is_large:
            return render()
        async with self._large_answers:
            return await asyncio.to_thread(render)

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

    async def _with_image(self, request: Request, image: ImageReference, call: CallContext) -> Request:
        if isinstance(image, ImageUri):
            return await self._with_fetched_image(request, image.uri, call)
        if self._store is None:
            raise ImageNotFound(image)
        stored = await self._store.find(call.namespace, image)
        return request.with_images((await self._store.read(call.namespace, stored),))

    async def _with_fetched_image(self, request: Request, uri: str, call: CallContext) -> Request:
        """Returns the request with its image, fetched once the engine has admitted the request to its queue."""
        if not is_embedded(uri):
            call.release()
        async with self._engine.expecting(request, deadline=call.deadline, tenant=call.principal):
            return request.with_images((await self._images.fetch(uri, call.principal),))


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
    usage = replace(first.usage, num_output_tokens=num_output_tokens)
    return replace(first, usage=usage, alternatives=tuple(others))


@contextmanager
def ending_with(*streams: Stream) -> Iterator[None]:
    """Cancels the requests when the block ends, however it ends. A finished request is left alone."""
    try:
        yield
    finally:
        for stream in streams:
            stream.cancel()
