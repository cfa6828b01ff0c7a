"""Builds the parts of an engine from a loaded model and a configuration.

    bounds of a step ─▶ prepared model ─▶ memory plan ─▶ step runner with its cache
        ─▶ pages and scheduler ─▶ preprocessing ─▶ captured graphs ─▶ loop

`build` follows this order; the functions below it build one part each. `LocalEngine` takes the parts, starts the
thread of the loop and watches it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from kestrel_runtime.adapters.base_model import ServedModel
from kestrel_runtime.adapters.files import AdapterFiles, AdapterSource
from kestrel_runtime.adapters.store import AdapterStore, AdapterTarget
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import EngineInfo, EngineStatus, MemoryPlan
from kestrel_runtime.api.errors import EngineUnavailable
from kestrel_runtime.constraints.compiler import ConstraintCompiler, new_vocabulary
from kestrel_runtime.constraints.masks import LibraryMasks
from kestrel_runtime.engine.flight_record import FlightRecord
from kestrel_runtime.engine.isolation import Isolation, new_probes
from kestrel_runtime.engine.loop import EngineLoop
from kestrel_runtime.engine.poison_requests import PoisonRequests
from kestrel_runtime.engine.preprocessing import Preprocessor
from kestrel_runtime.engine.recent import Matchers
from kestrel_runtime.execution.cuda_stream import CudaStream
from kestrel_runtime.execution.step_runner import StepRunner
from kestrel_runtime.fairness.image_budget import MAX_DECODING_BYTES, least_budget_bytes
from kestrel_runtime.fairness.queue_admission import QueueAdmission, QueueLimits
from kestrel_runtime.imaging.crop_hash import CropHash
from kestrel_runtime.imaging.crops import Cropping, Crops, max_kept_bytes, with_digests
from kestrel_runtime.imaging.device_crops import DeviceCropper, DeviceOperations
from kestrel_runtime.loading.checkpoint import Checkpoint, repository_of
from kestrel_runtime.memory.host_limits import available_processors
from kestrel_runtime.memory.plan import MemoryReading
from kestrel_runtime.models.family import config_of
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.cache_keys import Digest, EmbeddingKey, PrefixKeyMaker, key_parts
from kestrel_runtime.scheduling.crop_cache import CropCache
from kestrel_runtime.scheduling.embedding_cache import EmbeddingCache
from kestrel_runtime.scheduling.limits import StepBounds
from kestrel_runtime.scheduling.page_manager import PageManager
from kestrel_runtime.scheduling.scheduler import Scheduler

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of one engine, connected with each other. The thread of the loop has not been started."""

    info: EngineInfo
    num_image_tokens: int
    """The positions of an image in a prompt."""
    pages: PageManager
    page_bytes: int
    embeddings: EmbeddingCache
    bytes_per_image: int
    """The bytes of the embeddings of one image."""
    crops: CropCache
    bytes_per_crop: int
    """The bytes of one encoded crop."""
    scheduler: Scheduler
    adapters: AdapterStore | None
    """None if the engine serves no adapters."""
    poison_requests: PoisonRequests
    admission: QueueAdmission
    preprocessor: Preprocessor
    loop: EngineLoop


def build(
    loaded: LoadedModel,
    config: EngineConfig,
    become: Callable[[EngineStatus], None],
    *,
    owns_model: bool,
    flight_record: Path | None,
) -> EngineParts:
    """Build the parts in the order in which they need each other. Blocks.

    The engine thread calls `become` when it begins to recover, and when it serves again. With `owns_model` the
    weights of which a fused backend has a copy are freed. With `flight_record` the loop writes to this file which
    requests are in flight. Raises `CheckpointError` if the model cannot be served as `config` says.
    """
    family, model, model_config = loaded.family, loaded.model, config_of(loaded.model)
    bounds = _step_bounds(config, model.device)
    prepared = family.prepare(model, config, bounds, owns_model=owns_model)
    cropping, on_device = family.cropping(model_config), prepared.crop_on_device()
    max_decoded_bytes = _max_decoded_bytes(config, bounds, cropping, decoded=on_device is not None)
    num_pages, memory = prepared.plan_cache(max_decoded_bytes)
    # The numbers are also named arguments, which logs in JSON have as fields.
    facts = {"device": str(model.device), "total_bytes": memory.total_bytes, **dataclasses.asdict(memory)}
    _log.info("memory of %(device)s:\n" + memory.table().replace("%", "%%"), facts)
    adapters = _adapter_store(config, prepared.adapter_target(), loaded.checkpoint)
    runner = prepared.new_step_runner(
        num_pages, memory.graph_bytes, memory.image_cache_bytes, memory.crop_cache_bytes
    )
    info = _info(loaded, config, bounds, memory, num_pages * config.page_size)
    pages = PageManager(num_pages, config.page_size)
    embeddings = EmbeddingCache(bounds.max_batch_size + 1, runner.num_cached_images)
    crops = CropCache(runner.num_cached_crops)
    scheduler = _scheduler(config, bounds, pages, embeddings, crops)
    poison_requests = PoisonRequests()
    is_cached = partial(_is_cached, pages, embeddings)
    preprocessor = _preprocessor(
        loaded,
        info,
        cropping,
        on_device,
        is_cached,
        lambda: scheduler.is_idle,
        poison_requests,
        image_cache=runner.num_cached_images > 0,
        crop_cache=runner.num_cached_crops > 0,
        max_decoded_bytes=max_decoded_bytes,
    )
    runner.capture()
    admission = QueueAdmission(
        QueueLimits(config.max_queued_requests, config.max_queued_image_bytes, config.max_queued_tokens)
    )
    record = None if flight_record is None else FlightRecord(flight_record).write
    loop = _loop(loaded, scheduler, runner, preprocessor, admission, adapters, poison_requests, become, record)
    return EngineParts(
        info=info,
        num_image_tokens=model_config.positions_per_image,
        pages=pages,
        page_bytes=memory.cache_bytes // num_pages,
        embeddings=embeddings,
        bytes_per_image=runner.bytes_per_image,
        crops=crops,
        bytes_per_crop=runner.bytes_per_crop,
        scheduler=scheduler,
        adapters=adapters,
        poison_requests=poison_requests,
        admission=admission,
        preprocessor=preprocessor,
        loop=loop,
    )


def _step_bounds(config: EngineConfig, device: torch.device) -> StepBounds:
    """Returns the bounds of the work of one step, for which the memory beyond the weights must suffice."""
    reading = MemoryReading.of(device, 0, config.memory_limit)
    return StepBounds.of(config, device.type, reading.usable_bytes(config.memory_utilization))


def _max_decoded_bytes(config: EngineConfig, bounds: StepBounds, cropping: Cropping, *, decoded: bool) -> int:
    """Returns the configured limit, or memory for a running batch, the next one and the largest image to decode."""
    if config.max_decoded_image_bytes is not None:
        return config.max_decoded_image_bytes
    kept_bytes = 2 * bounds.max_batch_size * max_kept_bytes(cropping, decoded=decoded)
    return max(MAX_DECODING_BYTES + kept_bytes, least_budget_bytes(MAX_DECODING_BYTES))


def _adapter_store(
    config: EngineConfig, target: AdapterTarget | None, checkpoint: Checkpoint
) -> AdapterStore | None:
    if target is None:
        return None
    root = None if config.adapters is None else Path(config.adapters)
    source = AdapterSource(root, config.adapter_repositories, target.max_file_bytes)
    repository, revision = None, None
    if checkpoint.revision is not None:
        repository, pinned = repository_of(config.model)
        revision = config.revision or pinned
    revisions = tuple(name for name in (revision, checkpoint.revision) if name is not None)
    served = ServedModel(checkpoint.name, repository, revisions)

    def read(name: str) -> AdapterFiles:
        files = source.read(name)
        served.log_difference(name, files.config)
        return files

    read_upload = None if root is None else source.read_upload
    return AdapterStore(read, target, config.num_adapter_slots, source.names, read_upload)


def _info(
    loaded: LoadedModel, config: EngineConfig, bounds: StepBounds, memory: MemoryPlan, num_cache_tokens: int
) -> EngineInfo:
    """Describes the engine, and logs its cache, which has `num_cache_tokens` positions in all."""
    model_config = config_of(loaded.model)
    _log.info(
        "KV cache: %s tokens, %.1f GiB, %.1f requests of full length (%s tokens)",
        f"{num_cache_tokens:,}",
        memory.cache_bytes / 2**30,
        num_cache_tokens / model_config.max_context,
        f"{model_config.max_context:,}",
    )
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    return EngineInfo(
        model=loaded.checkpoint.name,
        revision=loaded.checkpoint.revision,
        architecture=model_config.architecture,
        skills={name: skill.defaults for name, skill in loaded.family.skills(model_config).items()},
        device=loaded.model.device.type,
        dtype=dtype,
        max_context_tokens=min(model_config.max_context, num_cache_tokens),
        max_batch_size=bounds.max_batch_size,
        num_parameters=loaded.num_parameters,
        config=config,
        memory=memory,
        device_uuid=loaded.device_uuid,
        device_name=loaded.device_name,
        chosen=dataclasses.replace(
            config.resolved(loaded.model.device.type),
            max_batch_size=bounds.max_batch_size,
            max_prefill_tokens=bounds.max_prefill_tokens,
            max_crops_per_step=bounds.max_crops,
            kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
            num_kv_pages=num_cache_tokens // config.page_size,
            image_cache_bytes=memory.image_cache_bytes,
            crop_cache_bytes=memory.crop_cache_bytes,
        ),
    )


def _scheduler(
    config: EngineConfig, bounds: StepBounds, pages: PageManager, embeddings: EmbeddingCache, crops: CropCache
) -> Scheduler:
    return Scheduler(
        pages,
        max_batch_size=bounds.max_batch_size,
        max_prefill_tokens=bounds.max_prefill_tokens,
        max_crops_per_step=bounds.max_crops,
        max_prefill_tokens_of_others=bounds.max_prefill_tokens_of_others,
        ageing_s=config.ageing_s,
        cuts_at_share_points=bounds.cuts_at_share_points,
        embeddings=embeddings,
        crops=crops,
    )


def _preprocessor(
    loaded: LoadedModel,
    info: EngineInfo,
    cropping: Cropping,
    on_device: DeviceOperations | None,
    is_cached: Callable[[Digest | None, EmbeddingKey | None], bool],
    is_idle: Callable[[], bool],
    poison_requests: PoisonRequests,
    *,
    image_cache: bool,
    crop_cache: bool,
    max_decoded_bytes: int,
) -> Preprocessor:
    config, model, model_config = info.config, loaded.model, config_of(loaded.model)
    make_crops, keep_pixels, on_thread = cropping.make_crops, None, contextlib.nullcontext
    if on_device is not None:
        # Urgent: an image has a few short kernels, and steps wait for its crops and their digests.
        on_stream, digest = CudaStream(model.device, is_urgent=True).entered_by_threads, None
        if crop_cache:
            digest = CropHash(cropping.crop_bytes, model.device, on_device.hash_words)
        make_crops = DeviceCropper(
            cropping,
            on_device.crop,
            on_stream,
            max_images=info.max_batch_size,
            digest=digest,
            crop_now=on_device.crop_now,
            is_idle=is_idle,
        )
        keep_pixels, on_thread = make_crops.keep, make_crops.on_thread
    elif crop_cache:
        make_crops = partial(_crops_with_digests, cropping)
    checkpoint = (loaded.checkpoint.name, loaded.checkpoint.revision)
    parts = key_parts(config, model=model_config, checkpoint=checkpoint, device=model.device, dtype=model.dtype)
    vocabulary = partial(new_vocabulary, loaded.tokenizer, model_config.vocab_size)
    compiler = ConstraintCompiler(vocabulary, available_processors())
    return Preprocessor(
        model_config,
        loaded.family.skills(model_config),
        loaded.tokenizer,
        poison_requests,
        cropping,
        make_crops,
        PrefixKeyMaker(parts, config.page_size),
        is_cached,
        matchers=Matchers(compiler),
        keep_pixels=keep_pixels,
        is_idle=is_idle,
        on_thread=on_thread,
        prefix_cache=config.prefix_cache,
        image_cache=image_cache,
        crop_cache=crop_cache,
        max_context=info.max_context_tokens,
        max_image_pixels=config.max_image_pixels,
        num_threads=config.num_preprocess_threads,
        max_decoded_bytes=max_decoded_bytes,
        ageing_s=config.ageing_s,
    )


def _crops_with_digests(cropping: Cropping, image: Image.Image) -> Crops:
    return with_digests(cropping.make_crops(image))


def _is_cached(
    pages: PageManager, embeddings: EmbeddingCache, share_point: Digest | None, embedding_key: EmbeddingKey | None
) -> bool:
    """Returns True if the pages or the embeddings of an image are cached now. Runs in a worker."""
    return (share_point is not None and pages.has(share_point)) or embedding_key in embeddings


def _loop(
    loaded: LoadedModel,
    scheduler: Scheduler,
    runner: StepRunner,
    preprocessor: Preprocessor,
    admission: QueueAdmission,
    adapters: AdapterStore | None,
    poison_requests: PoisonRequests,
    become: Callable[[EngineStatus], None],
    record: Callable[[Iterable[str]], None] | None,
) -> EngineLoop:
    isolation = Isolation(
        scheduler,
        runner,
        poison_requests,
        new_probes=partial(new_probes, preprocessor),
        on_restart=partial(become, EngineStatus.RECOVERING),
        on_restarted=partial(become, EngineStatus.SERVING),
    )
    loop = EngineLoop(
        scheduler,
        runner,
        isolation,
        admission,
        preprocessor.decode_again,
        LibraryMasks(config_of(loaded.model).vocab_size, available_processors()).masks,
        None if adapters is None else partial(_lease_again, adapters),
        poison_requests,
        record,
    )
    if adapters is not None:
        adapters.on_reclaim(loop.reclaim_adapters)
    return loop


def _lease_again(adapters: AdapterStore, name: str, tenant: str) -> Future[Any]:
    """Leases again for a request that has given its lease back. The future fails where the adapters are closed."""
    try:
        return adapters.acquire(name, tenant)
    except EngineUnavailable as error:
        refused: Future[Any] = Future()
        refused.set_exception(error)
        return refused
