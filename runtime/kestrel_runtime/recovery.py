"""After a step that raised: who must end, who goes on, and whether the device still works.

     step raises ─▶ all go back to waiting, and who was active is tried alone, oldest first
       a trial succeeds ─▶ the next one; after the last, everything goes on as before
       a trial raises ─▶ does a request of our own run?
           yes ─▶ the sequence is the culprit and ends; the others go on
           no ──▶ restart: fresh cache, same weights. Our request runs again ─▶ the sequence is tried once more
                                                      it does not ─────────▶ DeviceLost

Invariants
  R1  A sequence ends only after it raised alone, on a device that still ran our request.
  R2  After several culprits in a row with no success between them the device is restarted all the same: our
      request may be too small to notice what is wrong.
  R3  Whoever goes on keeps its tokens, and draws what it would have drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from kestrel_runtime.runner import ModelRunner
from kestrel_runtime.scheduler import Scheduler
from kestrel_runtime.sequence import Batch, Chunk, Sequence
from kestrel_runtime.tracebacks import clear_locals

_MAX_CULPRITS_IN_A_ROW = 3

_log = logging.getLogger(__name__)


class DeviceLost(Exception):
    """The device fails our own request even after a restart."""


class Recovery:
    """Sorts out failed steps. `new_probes` makes requests of our own, the first of them the cheapest."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        new_probes: Callable[[], Iterable[Sequence]],
        on_restart: Callable[[], None],
        on_restarted: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._new_probes = new_probes
        self._on_restart = on_restart
        self._on_restarted = on_restarted
        self._num_culprits_in_a_row = 0
        self._pardoned: Sequence | None = None

    def succeeded(self) -> None:
        """A step ran."""
        self._num_culprits_in_a_row = 0

    def failed(self, batch: Batch, error: Exception) -> Sequence | None:
        """Set up what comes after a step that raised. Returns the culprit once it is known; raises `DeviceLost`."""
        names = ", ".join(sequence.fingerprint for sequence in batch.members)
        is_trial = self._scheduler.is_trying
        _log.error("a step of %s failed%s", names, " in its trial" if is_trial else "", exc_info=error)
        self._scheduler.put_all_back()
        clear_locals(error)  # they hold tensors
        self._runner.forget_images()
        if isinstance(error, torch.OutOfMemoryError):
            _log.error("out of memory: the features of all images are dropped, and made anew when needed")
            self._runner.empty_device_cache()
        return self._judge(batch.members[0]) if is_trial else None

    def _judge(self, suspect: Sequence) -> Sequence | None:
        if not self._runs_probes(only_cheapest=True):
            self._restart()
            if suspect is not self._pardoned:  # it may have been the device; a second time it is the sequence
                self._pardoned = suspect
                return None
        self._num_culprits_in_a_row += 1
        if self._num_culprits_in_a_row >= _MAX_CULPRITS_IN_A_ROW:
            self._restart()
            self._num_culprits_in_a_row = 0
        return suspect

    def _restart(self) -> None:
        _log.error("the engine restarts: fresh cache, same weights")
        self._on_restart()
        try:
            self._runner.restart()
        except Exception as error:
            raise DeviceLost("the cache cannot be made anew") from error
        if not self._runs_probes(only_cheapest=False):
            raise DeviceLost("a request of our own fails after a restart")
        self._on_restarted()
        _log.info("the engine has restarted")

    def _runs_probes(self, *, only_cheapest: bool) -> bool:
        for probe in self._new_probes():
            probe.pages = list(range(self._scheduler.pages_for(probe)))  # all are free after a failure
            crops = [] if probe.crops is None else [probe.whole_image]
            try:
                self._runner.run(Batch(crops, [Chunk(probe, 0, probe.length)], []))
            except Exception:
                _log.exception("a request of our own failed too")
                return False
            finally:
                self._runner.release(probe)
            if only_cheapest:
                break
        return True
