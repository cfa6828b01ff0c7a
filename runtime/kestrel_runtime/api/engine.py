"""Defines the protocol of an engine, and the facts that an engine reports about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from kestrel_runtime.api.adapters import AdapterInfo, AdapterLoad
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import ImageError, InvalidRequest, ModelNotFound, SkillUnsupported, Violation
from kestrel_runtime.api.images import Image, RawImage
from kestrel_runtime.api.requests import Request, locate
from kestrel_runtime.api.stream import Stream

_GIB = 2**30


class EngineStatus(Enum):
    """Says what the engine does with new requests."""

    SERVING = auto()
    DRAINING = auto()
    """Refuses new requests and finishes the current ones."""
    RECOVERING = auto()
    """Refuses new requests while it restarts after a failure; the current ones continue afterwards."""
    DEAD = auto()
    """Closed, or stopped by a failure."""


@dataclass(frozen=True, slots=True)
class SkillDefaults:
    """The defaults of a skill's settings."""

    temperature: float
    top_p: float
    max_tokens: int | None = None
    """The most tokens that are generated; None where the number of objects limits the answer."""
    max_objects: int | None = None
    """The most objects that are found; None for other skills than point and detect."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division of the memory at start, in bytes. The sum of all terms is `total_bytes`.

    On a CUDA device the memory is the device's; elsewhere it is the amount that the host and its control groups
    allow.
    """

    total_bytes: int
    utilization: float
    """Share of the memory that may be taken, from 0 to 1."""
    weight_bytes: int
    """Weights in the layout that runs, with the static buffers that belong to them."""
    cache_bytes: int
    """The KV cache."""
    activation_bytes: int
    """Activations of the largest step that runs without a captured graph, and the state of sequences with
    penalties."""
    graph_bytes: int
    """Captured CUDA graphs and their memory pools; 0 without graphs."""
    image_bytes: int
    """Images and their crops: those on the device for a CUDA device, all decoded ones on a host."""
    other_bytes: int
    """Memory that is taken otherwise: by other processes, and by the context and the libraries of this process."""
    margin_bytes: int
    """Memory that is kept free for static inputs and later allocations of drivers."""
    free_bytes: int
    """Memory that has no planned use."""
    image_cache_bytes: int = 0
    """Image embeddings that are kept for later requests."""
    adapter_bytes: int = 0
    """Slots of adapters."""
    crop_cache_bytes: int = 0
    """Encoded crops that are kept for later images."""

    def terms(self) -> list[tuple[str, int]]:
        """Yields the name and the bytes of each term, in the order of a table."""
        return [
            ("weights", self.weight_bytes),
            ("KV cache", self.cache_bytes),
            ("activations", self.activation_bytes),
            ("CUDA graphs", self.graph_bytes),
            ("images", self.image_bytes),
            ("image cache", self.image_cache_bytes),
            ("crop cache", self.crop_cache_bytes),
            ("adapters", self.adapter_bytes),
            ("other processes, context and libraries", self.other_bytes),
            ("margin", self.margin_bytes),
            ("free", self.free_bytes),
        ]

    def table(self) -> str:
        """Returns a line for each term, in GiB, and a line for the total."""
        rows = [*self.terms(), ("total", self.total_bytes)]
        return "\n".join(f"{name:40} {num_bytes / _GIB:8.2f} GiB" for name, num_bytes in rows)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The served model and its limits, for discovery."""

    model: str
    """The name of the checkpoint, which requests may give as their model."""
    revision: str | None
    """The commit of a checkpoint of the hub; None for local files and the built-in model."""
    architecture: str
    """The architecture that the model's configuration names."""
    skills: Mapping[str, SkillDefaults]
    """The defaults of each skill by its name, in the order in which clients see the skills."""
    device: str
    """The type of the device: cpu or cuda."""
    dtype: str
    """The number format of activations, such as bfloat16."""
    max_context_tokens: int
    """The most positions of a request: its prompt, its image and its answer."""
    max_batch_size: int
    """The most requests that generate at a time."""
    num_parameters: int
    """Parameters of the model, those of all experts included."""
    config: EngineConfig
    """The settings of the engine."""
    memory: MemoryPlan | None = None
    """The division of the device's memory at start; None where no memory was divided."""
    device_uuid: str | None = None
    """The GPU's identifier for its driver, such as "1a2b3c4d-…"; None on the host."""
    device_name: str = ""
    """The name of the GPU, such as "NVIDIA H200"; empty on the host."""
    chosen: EngineConfig | None = None
    """The settings with this device's values in place of None and "auto"; None where they are not known."""

    def check(self, request: Request) -> None:
        """Raises `ModelNotFound`, `SkillUnsupported` or `ImageError` for a request that this model cannot serve."""
        if request.options.model not in ("", self.model):
            raise ModelNotFound(request.options.model)
        if request.skill not in self.skills:
            raise SkillUnsupported(request.skill, self.model)
        if request.objects:
            self.check_number_of_objects(request)
        images = request.images
        for place, image in enumerate(images):
            try:
                self.check_image(image)
            except ImageError as error:
                locate(error, request, place)
                raise
        limit_bytes = self.config.max_queued_image_bytes
        if len(images) > 1 and (num_bytes := sum(map(len, images))) > limit_bytes:
            text = f"the images take {num_bytes} bytes together and must not exceed {limit_bytes}"
            raise ImageError(text, too_large=True, field="messages")

    def check_number_of_objects(self, request: Request) -> None:
        """Raises `InvalidRequest` for more objects than the queue ever has room for."""
        num_objects, max_queued = len(request.objects), self.config.max_queued_requests
        if num_objects > max_queued:
            text = f"are {num_objects}, and the queue of this server holds {max_queued} requests"
            raise InvalidRequest((Violation("objects", text),))

    def check_image(self, image: Image) -> None:
        """Raises `ImageError` for an image of too many bytes."""
        num_bytes = image.padded_bytes if isinstance(image, RawImage) else len(image)
        if num_bytes > self.config.max_image_bytes:
            raise ImageError(f"the image must not exceed {self.config.max_image_bytes} bytes", too_large=True)


@dataclass(frozen=True, slots=True)
class CacheLoad:
    """A reading of one cache. Counts start at the start of the engine; a cache that is off has `total_bytes` 0."""

    num_lookups: int = 0
    """Requests that looked into the cache."""
    num_hits: int = 0
    """Requests that found at least a part of their content."""
    num_evictions: int = 0
    """Entries that were dropped to free memory for others."""
    used_bytes: int = 0
    """Memory of entries that can be found, whether they are in use or not."""
    total_bytes: int = 0
    """The most memory that entries can take."""
    oldest_age_s: float | None = None
    """Seconds since the oldest entry was stored, 0 for an empty cache; None for a cache that is off."""


@dataclass(frozen=True, slots=True)
class ClearedCache:
    """The content that `Engine.clear_cache` or `Engine.forget_image` removed."""

    num_pages: int
    """Pages of the KV cache."""
    num_images: int
    """Images whose embeddings were cached."""
    num_crops: int = 0
    """Encoded crops."""


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """The facts in the header of an image file. A recorded orientation is not applied to the size."""

    media_type: str
    """The media type, such as "image/jpeg"."""
    width_px: int
    height_px: int


@dataclass(frozen=True, slots=True)
class Load:
    """A reading of how busy the engine is."""

    num_running: int
    """Requests that hold a row of the batch: their prompts are being computed, or they generate."""
    num_waiting: int
    """Prepared requests that wait for a row or for pages."""
    num_preprocessing: int
    """Requests that wait for a preprocessing worker, or are being prepared."""
    num_used_pages: int
    """Pages of the KV cache that requests hold."""
    num_pages: int
    """All pages of the KV cache."""
    tokens_per_second: float
    """Generated tokens per second, over the last seconds."""
    decoded_image_bytes: int = 0
    """Memory of images that are being decoded or that requests hold."""
    prefix_cache: CacheLoad = CacheLoad()
    """Pages of the KV cache that later requests can use."""
    image_cache: CacheLoad = CacheLoad()
    """Image embeddings that later requests can use."""
    crop_cache: CacheLoad = CacheLoad()
    """Encoded crops that later images can use; it counts crops instead of requests."""
    adapters: AdapterLoad = field(default_factory=AdapterLoad)
    num_compilations_awaited: int = 0
    """Kernels that were compiled, or loaded from the folder of compiled kernels, since the engine was ready."""
    num_captures_awaited: int = 0
    """Captures of CUDA graphs during which a request arrived."""
    requests_per_second: float = 0.0
    """Requests per second that got their whole answer, over the last seconds."""


@dataclass(frozen=True, slots=True)
class CoreReading:
    """A reading of one engine core. An engine in this process is its only core."""

    index: int
    """The index of the core, from 0."""
    status: EngineStatus
    info: EngineInfo | None
    """The served model and its limits; None until the core's process reports them for the first time."""
    load: Load | None
    """The latest reading; None while the core's process restarts."""
    process_id: int | None
    """The core's process; None while it restarts."""


class Engine(Protocol):
    """An engine that has been started, in this process or in others: its users need not know where it runs."""

    @property
    def info(self) -> EngineInfo:
        """The served model and its limits. They never change."""
        ...

    @property
    def status(self) -> EngineStatus:
        """The status of the engine towards new requests."""
        ...

    def on_status_change(self, callback: Callable[[EngineStatus], None]) -> None:
        """Registers a function that is called at every change of `status`, in any thread."""
        ...

    def submit_samples(
        self,
        request: Request,
        *,
        deadline: float | None = None,
        tenant: str = "",
        namespace: str = "",
        route: str = "",
    ) -> list[Stream]:
        """Queues a request that must end by `deadline` (`api/deadlines.py`), with a stream for each of its
        parts: samples, or objects (`parts_of`).

        The streams raise refusals, before any event; if the queue refuses one part, none runs. Tenants share the
        engine evenly. Requests of different namespaces never share cached data. Of several engine processes, one
        answers requests with the same `route` if it can, or else those with the same first image.
        """
        ...

    def expecting(
        self, request: Request, *, deadline: float | None = None, tenant: str = ""
    ) -> AbstractAsyncContextManager[None]:
        """Returns a context that holds a place in the queue for a request whose image is still being fetched.

        The request may have any image until then. Entering raises `EngineUnavailable`, `ModelNotFound`,
        `SkillUnsupported`, `ImageError` and `Overloaded`.
        """
        ...

    async def clear_cache(self, namespace: str | None = None) -> ClearedCache:
        """Removes the cached data of a namespace, or of all namespaces if it is None, and returns the amounts.

        Running requests continue and cache nothing more. Returns once the engine's thread has removed the data.
        Raises `EngineUnavailable`.
        """
        ...

    async def forget_image(self, digest: bytes, namespace: str = "") -> ClearedCache:
        """Removes the cached data of one image of a namespace, like `clear_cache`.

        `digest`: the SHA-256 of the image's encoded bytes.
        """
        ...

    def inspect_image(self, data: bytes) -> ImageInfo:
        """Reads the header of an image file. Raises `ImageError` for a file that requests could not use."""
        ...

    def adapters(self) -> Sequence[AdapterInfo]:
        """Returns the loaded adapters."""
        ...

    async def adapter_names(self) -> Sequence[str]:
        """Returns the names of adapters that requests may use, at most 1,000, in order."""
        ...

    async def load_adapter(self, name: str) -> AdapterInfo:
        """Reads an adapter's files again, loads them if their content is new, and returns the loaded adapter.

        Raises `AdapterNotFound`, `AdapterInvalid` and `EngineUnavailable`.
        """
        ...

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Frees an adapter's slot once no request uses it. Raises `AdapterNotFound` if it is not loaded."""
        ...

    async def check_adapter(self, folder: str, name: str) -> str:
        """Reads and checks the files of a folder, in that of all adapters, that is to be the adapter `name`.

        Returns their SHA-256 as hexadecimal digits. Loads nothing. Raises `AdapterInvalid` with every problem,
        `AdapterNotFound` if the engine has no adapters, and `EngineUnavailable`.
        """
        ...

    async def adapter_changed(self, name: str) -> None:
        """Has later requests use the files that the adapter of this name has now.

        Running requests keep the version that they began with. Raises `EngineUnavailable`.
        """
        ...

    def load(self) -> Load:
        """Returns a reading of the load of all cores together."""
        ...

    def cores(self) -> Sequence[CoreReading]:
        """Returns a reading of each core, in the order of their indices."""
        ...

    async def drain(self) -> None:
        """Refuses new requests, and returns when the current ones have ended."""
        ...

    def close(self) -> None:
        """Ends all requests and stops the engine. Blocks until it has stopped."""
        ...
