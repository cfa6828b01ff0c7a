"""What the engine's thread is doing, named in profiles: encode, prefill, decode, wait."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import record_function

from bench.harness.wrapping import Method, wrapped
from kestrel_runtime.execution.step_inputs import PrefillInputs
from kestrel_runtime.execution.step_runner import StepHandle, StepRunner

PHASES = ("encode", "prefill", "decode", "wait")
_Namer = Callable[..., str]
"""The phase of a call, from its arguments."""
_METHODS: tuple[tuple[type, str, _Namer], ...] = (
    (StepRunner, "_copy_and_encode", lambda runner, batch: "encode"),
    (StepRunner, "_run_whole", lambda runner, inputs: "prefill" if isinstance(inputs, PrefillInputs) else "decode"),
    (StepHandle, "wait", lambda handle: "wait"),
)


@contextlib.contextmanager
def marked_phases(*, with_nvtx: bool) -> Iterator[None]:
    """Until the block ends, each phase is a range of the torch profiler, and with `with_nvtx` an NVTX range too."""
    with contextlib.ExitStack() as stack:
        for owner, name, namer in _METHODS:
            stack.enter_context(wrapped(owner, name, functools.partial(_marked, namer, with_nvtx)))
        yield


def _marked(namer: _Namer, with_nvtx: bool, method: Method) -> Method:
    @functools.wraps(method)
    def marked(*arguments: Any, **keywords: Any) -> Any:
        phase = namer(*arguments, **keywords)
        range_of_tools = torch.cuda.nvtx.range(phase) if with_nvtx else contextlib.nullcontext()
        with range_of_tools, record_function(phase):
            return method(*arguments, **keywords)

    return marked
