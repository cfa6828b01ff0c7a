"""Builds the step runner of a loaded Moondream."""

from __future__ import annotations

from functools import partial

from kestrel_runtime.api.config import MIB
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.step_runner import StateShape, StepRunner
from kestrel_runtime.models.moondream.adapters.slabs import AdapterSlabs
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.executor import MoondreamExecutor
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.model_paths import ModelPaths
from kestrel_runtime.models.moondream.sampling import VALUES_PER_TOKEN, value_kinds
from kestrel_runtime.scheduling.limits import StepBounds

_DEFAULT_GRAPH_BYTES = 4096 * MIB


def new_step_runner(
    model: Moondream,
    cache: KVCache,
    paths: ExecutionConfig,
    bounds: StepBounds,
    model_paths: ModelPaths | None = None,
    *,
    graph_bytes: int = _DEFAULT_GRAPH_BYTES,
    image_cache_bytes: int = 0,
    adapters: AdapterSlabs | None = None,
) -> StepRunner:
    """`model_paths`: the paths of the model, if they are built already.

    Captured graphs and their pools may take `graph_bytes` of device memory, cached image embeddings
    `image_cache_bytes`.
    """
    if model_paths is None:
        model_paths = ModelPaths.of(model, paths, max_batch_size=bounds.max_batch_size)
    text = model.config.text
    return StepRunner(
        partial(MoondreamExecutor, model, model_paths, paths.kernels, adapters=adapters),
        cache,
        StateShape(
            vocab_size=text.vocab_size,
            max_context=text.max_context,
            values_per_token=VALUES_PER_TOKEN,
            positions_per_image=model.config.vision.num_image_tokens,
            embedding_dim=text.dim,
            embedding_dtype=model.dtype,
            value_kinds=partial(value_kinds, ids=model.config.tokenizer),
        ),
        bounds,
        max_graph_bytes=graph_bytes if paths.with_graphs else None,
        image_cache_bytes=image_cache_bytes,
    )
