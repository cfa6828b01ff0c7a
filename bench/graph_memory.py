"""What do steps and captured CUDA graphs take of a GPU's memory, beside what the memory plan reserves for them?

Loads a model as a server does and prints: the activations of the largest steps, the graphs that are captured at the
start with their number, time and memory, and how long a capture in a quiet time takes. Ends
with status 1 where a measured figure is above its reserve, or less than the margin is free in the end.

    python -m bench.random_weights moondream2 /tmp/md2 && python -m bench.graph_memory --model /tmp/md2
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from pathlib import Path

import torch

from bench.harness.engine_options import add_engine_options, engine_config
from bench.harness.report import write_json
from kestrel_runtime.api.config import MIB, EngineConfig
from kestrel_runtime.execution.captured_graphs import CapturedGraphs, GraphBudget
from kestrel_runtime.execution.cuda_stream import CudaStream
from kestrel_runtime.execution.graph_capture import StreamCapture
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.executor import new_step_runner
from kestrel_runtime.models.moondream.memory import (
    cache_dtype,
    estimated_step_bytes,
    largest_encode,
    largest_prefill,
    new_cache,
    peak_bytes,
    plan_cache,
    step_bytes,
)
from kestrel_runtime.models.moondream.model_paths import ModelPaths
from kestrel_runtime.scheduling.limits import StepBounds


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("graph_memory: needs a CUDA device", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    figures = measure(engine_config(parser, arguments))
    for name, value in figures.items():
        print(f"{name:45} {value:12,.1f}")
    if arguments.json is not None:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        write_json(arguments.json, {"machine": machine, "figures": figures})
    largest_step = max(figures["largest encode, MiB"], figures["largest prefill, MiB"])
    steps_fit = largest_step <= 1.05 * figures["step reserve, MiB"]  # two measurements differ a little
    graphs_fit = figures["graphs at the start, MiB"] <= figures["graph reserve, MiB"]
    margin_is_left = figures["free in the end, MiB"] >= figures["margin, MiB"]
    return 0 if steps_fit and graphs_fit and margin_is_left else 1


@torch.inference_mode()
def measure(config: EngineConfig) -> dict[str, float]:
    """The figures by what they are, unit included."""
    loaded = LoadedModel.load(config)
    model, device = loaded.model, loaded.model.device
    paths, bounds = ExecutionConfig.of(config, device.type), StepBounds.of(config, device.type)
    torch.cuda.synchronize()
    loaded_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model_paths = ModelPaths.of(model, paths, max_batch_size=bounds.max_batch_size, frees_originals=True)
    peak_bytes_of_conversion = torch.cuda.max_memory_allocated()
    num_pages, plan = plan_cache(
        model,
        config,
        bounds,
        step_bytes=step_bytes(model, model_paths, bounds, config.page_size, cache_dtype(model, config)),
        weight_bytes=loaded_bytes,
        with_graphs=paths.with_graphs,
        host_image_bytes=0,
    )
    cache = new_cache(model, config, num_pages)
    figures = {
        "weights as loaded, MiB": loaded_bytes / MIB,
        "largest while they were converted, MiB": peak_bytes_of_conversion / MIB,
        **{f"planned: {name}, MiB": num_bytes / MIB for name, num_bytes in plan.terms()},
        "estimated largest step, MiB": estimated_step_bytes(model.config, bounds, model.dtype.itemsize) / MIB,
        "step reserve, MiB": plan.activation_bytes / MIB,
        "graph reserve, MiB": plan.graph_bytes / MIB,
        "margin, MiB": plan.margin_bytes / MIB,
    }
    figures["largest encode, MiB"] = peak_bytes(largest_encode(model, model_paths, bounds)) / MIB
    figures["largest prefill, MiB"] = peak_bytes(largest_prefill(model, model_paths, cache, bounds)) / MIB
    before = _free_bytes()
    runner = new_step_runner(model, cache, paths, bounds, model_paths, graph_bytes=plan.graph_bytes)
    started = time.monotonic()
    runner.capture()
    figures["start captures, s"] = time.monotonic() - started
    captures = runner._graphs
    assert captures is not None, "a GPU has captured graphs"
    figures["graphs at the start"] = captures.budget.num_graphs
    figures["graphs at the start, MiB"] = captures.budget.num_bytes / MIB
    figures["runner and graphs by the driver, MiB"] = (before - _free_bytes()) / MIB
    figures["late capture of an encoding, ms"] = _late_capture_ms(loaded, model_paths)
    figures["free in the end, MiB"] = _free_bytes() / MIB
    return figures


def _free_bytes() -> int:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _tile_shape(loaded: LoadedModel) -> tuple[int, int, int]:
    vision = loaded.model.config.vision
    return vision.crop_size, vision.crop_size, vision.in_channels


def _late_capture_ms(loaded: LoadedModel, model_paths: ModelPaths) -> float:
    """Host time of a capture."""
    stream = CudaStream(loaded.model.device)
    graphs = CapturedGraphs("encodings", StreamCapture(stream), GraphBudget(max_bytes=2**40))
    tiles = torch.zeros(2, *_tile_shape(loaded), dtype=torch.uint8, device=loaded.model.device)
    torch.cuda.synchronize()
    with stream.entered():
        for _ in range(2):
            graphs.run("two tiles", lambda: model_paths.vision.encode(tiles))
    torch.cuda.synchronize()
    started = time.monotonic()
    graphs.capture_wanted()
    return (time.monotonic() - started) * 1e3


if __name__ == "__main__":
    sys.exit(main())
