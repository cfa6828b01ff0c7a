"""What the engine's thread is doing, named in profiles: encode, prefill, decode, wait."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.profiler import record_function

from bench.harness.wrapping import Method, wrapped
from kestrel_runtime.execution.step_runner import StepHandle, StepRunner

_METHODS: Mapping[str, tuple[type, str]] = MappingProxyType(
    {
        "encode": (StepRunner, "_copy_and_encode"),
        "prefill": (StepRunner, "_prefill"),
        "decode": (StepRunner, "_decode"),
        "wait": (StepHandle, "wait"),
    }
)
PHASES = tuple(_METHODS)


@contextlib.contextmanager
def marked_phases(*, with_nvtx: bool) -> Iterator[None]:
    """Until the block ends, each phase is a range of the torch profiler, and with `with_nvtx` an NVTX range too."""
    with contextlib.ExitStack() as stack:
        for phase, (owner, name) in _METHODS.items():
            stack.enter_context(wrapped(owner, name, functools.partial(_marked, phase, with_nvtx)))
        yield


def _marked(phase: str, with_nvtx: bool, method: Method) -> Method:
    @functools.wraps(method)
    def marked(*arguments: Any, **keywords: Any) -> Any:
        range_of_tools = torch.cuda.nvtx.range(phase) if with_nvtx else contextlib.nullcontext()
        with range_of_tools, record_function(phase):
            return method(*arguments, **keywords)

    return marked
