"""Finds the poison request that must end after a step that raised, if any, and checks that the device works.

     a step raises ─▶ all sequences wait again; those that were active run alone (isolation runs), oldest first
       an isolation run succeeds ─▶ the next one; after the last, all sequences run together again
       an isolation run raises ─▶ does a probe, which is a small request of the engine's own, run?
           yes, for the first time ──▶ the sequence runs alone once more
           yes, for the second time ─▶ the sequence is a poison request and ends; the others go on
           no, for the first time ───▶ restart: fresh cache, same weights; then the sequence runs alone once more
           no, for the second time ──▶ restart; the sequence is a poison request and ends
       a probe fails after a restart too ─▶ DeviceLost

In an isolation run no other step is in flight. The second run follows the first at once, and has the device to
itself: no other sequence holds pages, all images are forgotten, and after an out-of-memory error the allocator has
returned what it kept. So a sequence that runs out of memory twice needs more than there is; one that ran out of
memory because of others passes the second time.

Invariants
  R1  A sequence ends only after it failed alone twice, each time on a device that still ran a probe; or after the
      device failed a probe twice while the sequence ran alone.
  R2  After several poison requests in a row, with no successful step between them, the device is restarted before
      the next one ends, and that one runs alone once more: a probe may be too small to notice a fault of the
      device.
  R3  A sequence that goes on keeps its tokens, and samples what it would have sampled.
  R4  A restart clears the quarantine, since the device may have been faulty when requests were quarantined; except
      for requests that made the device fail again right after it was restarted.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from PIL import Image

from kestrel_runtime.api.errors import InvalidRequest, clear_locals
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.engine.poison_requests import PoisonRequests
from kestrel_runtime.engine.preprocessing import Preprocessor
from kestrel_runtime.execution.step_runner import StepRunner
from kestrel_runtime.scheduling.batch import Batch, Chunk, EncodeItem
from kestrel_runtime.scheduling.scheduler import Scheduler
from kestrel_runtime.scheduling.sequence import SequenceClock, TokenSequence

_MAX_POISON_IN_A_ROW = 3
_NUM_RUNS = 2
"""Isolation runs that must fail before a sequence ends."""

_log = logging.getLogger(__name__)


class DeviceLost(Exception):
    """The device fails a probe even after a restart."""


@dataclass(slots=True)
class _Failures:
    """Counts the failed isolation runs of one sequence. Refers to it by id, so that it keeps no image alive."""

    sequence_id: int
    num_with_device: int = 0
    """Failures after which the device still ran a probe."""
    num_without_device: int = 0
    """Failures after which the device failed a probe."""


class Isolation:
    """Decides what follows a failed step. `new_probes` makes probes, the first of them the cheapest.

    Quarantines poison requests in `poison_requests`. Engine thread only.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        poison_requests: PoisonRequests,
        *,
        new_probes: Callable[[], Iterable[TokenSequence]],
        on_restart: Callable[[], None],
        on_restarted: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._poison_requests = poison_requests
        self._new_probes = new_probes
        self._on_restart = on_restart
        self._on_restarted = on_restarted
        self._num_poison_in_a_row = 0
        self._failures: _Failures | None = None

    def succeeded(self, sampled: list[TokenSequence]) -> None:
        """Note that a step succeeded, and that these sequences got a token."""
        if sampled:  # else an isolation run may have another step
            self._num_poison_in_a_row = 0
            self._failures = None

    def failed(self, batch: Batch, error: Exception) -> TokenSequence | None:
        """Prepare the scheduler for the turns after a step that raised. No other step may be in flight.

        Returns the poison sequence once it is known, which must end then. Raises `DeviceLost`.
        """
        names = ", ".join(sequence.request.fingerprint for sequence in batch.sequences)
        is_alone = self._scheduler.is_isolating
        _log.error("a step of %s failed%s", names, ", which ran alone" if is_alone else "", exc_info=error)
        self._scheduler.preempt_all()
        clear_locals(error)  # they hold tensors
        self._runner.forget_images()
        if isinstance(error, torch.OutOfMemoryError):
            _log.error("out of memory: the features of all images are dropped, and computed again when needed")
            self._runner.empty_device_cache()
        return self._find_poison(batch.sequences[0]) if is_alone else None

    def _find_poison(self, isolated: TokenSequence) -> TokenSequence | None:
        """Returns the isolated sequence if it failed often enough to end; otherwise None: it runs alone again."""
        if self._failures is None or self._failures.sequence_id != isolated.id:
            self._failures = _Failures(isolated.id)
        failures = self._failures
        if self._runs_probes(only_cheapest=True):
            failures.num_with_device += 1
        else:
            self._restart()
            failures.num_without_device += 1
        breaks_device = failures.num_without_device >= _NUM_RUNS
        if failures.num_with_device < _NUM_RUNS and not breaks_device:
            return None
        if self._num_poison_in_a_row >= _MAX_POISON_IN_A_ROW - 1 and not breaks_device:
            self._restart()
            failures.num_with_device = 0
            return None
        self._num_poison_in_a_row += 1
        self._poison_requests.quarantine(isolated.request.fingerprint, survives_restart=breaks_device)
        self._failures = None
        return isolated

    def _restart(self) -> None:
        _log.error("the engine restarts: fresh cache, same weights")
        self._on_restart()
        try:
            self._runner.restart()
        except Exception as error:
            raise DeviceLost("the cache cannot be allocated again") from error
        if not self._runs_probes(only_cheapest=False):
            raise DeviceLost("a probe fails after a restart")
        self._num_poison_in_a_row = 0
        self._poison_requests.forget_learned_before_restart()
        self._on_restarted()
        _log.info("the engine has restarted")

    def _runs_probes(self, *, only_cheapest: bool) -> bool:
        for probe in self._new_probes():
            self._scheduler.allocate_probe(probe)  # after a failure every page is available
            encode = [EncodeItem.rest_of(probe, image) for image in probe.images]
            try:
                self._runner.run(Batch.of_prefill(encode, [Chunk.of(probe, 0, probe.length)]))
            except Exception:
                _log.exception("a probe, which is a request of the engine's own, failed too")
                return False
            finally:
                self._runner.release(probe)
                self._scheduler.release_probe(probe)
            if only_cheapest:
                break
        return True


def new_probes(preprocessor: Preprocessor) -> Iterator[TokenSequence]:
    """Yields probes: a short question, and the same about a small grey image if the cache can hold one."""
    greedy = SamplingParams(temperature=0.0)
    yield preprocessor.prepare(Query("hello", sampling=greedy), SequenceClock(time.monotonic()))
    file = io.BytesIO()
    Image.new("RGB", (32, 32), "grey").save(file, "PNG")
    try:
        yield preprocessor.prepare(
            Query("hello", file.getvalue(), sampling=greedy), SequenceClock(time.monotonic())
        )
    except InvalidRequest:  # an image does not fit into the context, or the model takes none
        return
