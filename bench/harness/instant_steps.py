"""Leaves out the model: steps of queries that continue a cached prefix return at once, all with the same token.

What is left is the host's work beside the launching of steps. Steps that begin a prompt are run, so that pages are
computed and published. As a program, this is `kestrel-grpc` with such steps, also in engine cores of their own.
"""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from unittest import mock

import kestrel_grpc.__main__
from kestrel_grpc.multiprocess.supervision import supervisor
from kestrel_grpc.multiprocess.supervision.__main__ import run as run_child
from kestrel_runtime.execution.step_runner import StepHandle, StepRunner
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.batch import Batch

_TOKEN = Token(100)

_launch = StepRunner.launch


class _InstantHandle(StepHandle):
    def __init__(self, num_sampled: int) -> None:
        self._num_sampled = num_sampled

    def is_complete(self) -> bool:
        return True

    def wait(self) -> list[Token]:
        return [_TOKEN] * self._num_sampled


def _launch_or_skip(runner: StepRunner, batch: Batch, after: Iterable[StepHandle] = ()) -> StepHandle:
    reads_image = batch.encode or any(chunk.start == 0 for chunk in batch.prefill)
    if reads_image or not all(sequence.request.fingerprint.startswith("query-") for sequence in batch.sequences):
        return _launch(runner, batch, after)
    return _InstantHandle(len(batch.sampled))


def leave_out_model() -> AbstractContextManager[object]:
    """Within the block, in this process."""
    return mock.patch.object(StepRunner, "launch", _launch_or_skip)


if __name__ == "__main__":
    module = mock.patch.object(supervisor._Core, "module", "bench.harness.instant_steps")
    with leave_out_model(), module:
        if sys.argv[1:2] == ["core"]:  # started by the supervisor
            run_child()
        sys.exit(kestrel_grpc.__main__.main())
