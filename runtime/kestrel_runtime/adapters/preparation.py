"""Prepares a request once its adapter is loaded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kestrel_runtime.adapters.store import Lease
from kestrel_runtime.api.errors import EngineUnavailable

Result = TypeVar("Result")


class AdapterPreparation(Future[Result]):
    """The preparation of a request that begins when its adapter is loaded. It can be cancelled before and after."""

    def __init__(self, lease: Future[Lease], submit: Callable[[Lease], Future[Result]]) -> None:
        """`submit` has a worker prepare the request with its adapter."""
        super().__init__()
        self._submit = submit
        self._current: Future[Any] = lease
        lease.add_done_callback(self._begin)

    def cancel(self) -> bool:
        return self._current.cancel()

    def _begin(self, done: Future[Lease]) -> None:
        if done.cancelled():
            super().cancel()
            return
        error = done.exception()
        if error is not None:
            self.set_exception(error)
            return
        lease = done.result()
        try:
            preparation = self._submit(lease)
        except BaseException as failure:
            lease.end()
            self.set_exception(_refusal(failure))
            return
        self._current = preparation
        preparation.add_done_callback(lambda prepared: self._end(lease, prepared))

    def _end(self, lease: Lease, done: Future[Result]) -> None:
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or error is not None:
            lease.end()
        if done.cancelled():
            super().cancel()
        elif error is not None:
            self.set_exception(error)
        else:
            self.set_result(done.result())


def _refusal(failure: BaseException) -> BaseException:
    if isinstance(failure, RuntimeError):  # the workers are closed, or the system has no thread left for us
        return EngineUnavailable("no worker can take the request")
    return failure
