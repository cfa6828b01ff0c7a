"""Loads adapters on a thread of its own, and leases them to requests.

A request for an adapter that is not loaded waits until it is, together with other requests for that adapter; all
other requests continue. Adapters are loaded one after the other: first those of the tenant that holds the fewest
slots, else in the order in which they were first named.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kestrel_runtime.adapters.files import AdapterFiles
from kestrel_runtime.adapters.slots import AdapterSlots, Residence
from kestrel_runtime.api.adapters import AdapterInfo, AdapterLoad, AdapterName
from kestrel_runtime.api.errors import (
    AdapterInvalid,
    AdapterNotFound,
    EngineUnavailable,
    InternalError,
    KestrelError,
    did_you_mean,
)

LISTING_S = 1.0
"""The shortest time between two listings of the folder of adapters, for all callers together."""

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class AdapterTarget(Protocol):
    """Checks adapters and writes them to slots of the device. For one thread at a time, while steps run."""

    @property
    def max_file_bytes(self) -> int:
        """Returns the size of the largest file that an adapter within the limits can have."""
        ...

    def check(self, files: AdapterFiles) -> Any:
        """Returns the weights of an adapter, on the host. Raises `AdapterInvalid` with every problem."""
        ...

    def write(self, slot: int, weights: Any) -> None:
        """Writes the weights that `check` returned to an unused slot, from 1. Returns when the slot is written."""
        ...


class Lease:
    """A request's hold on one version of an adapter; see `AdapterLease`."""

    def __init__(self, residence: Residence, tenant: str, end: Callable[[Residence, str], None]) -> None:
        self.name = residence.name
        self.tenant = tenant
        self.slot = residence.slot
        self.digest = residence.digest
        self._residence = residence
        self._end: Callable[[Residence, str], None] | None = end

    @property
    def is_reclaimed(self) -> bool:
        """Returns True if the request has to give this lease back and acquire another one."""
        return self._end is not None and self._residence.is_reclaimed

    def end(self) -> None:
        """Gives the lease back; without effect the second time. For one thread at a time."""
        end, self._end = self._end, None
        if end is not None:
            end(self._residence, self.tenant)


@dataclass(slots=True)
class _Pending:
    """An adapter to be loaded, and the callers that wait for it."""

    name: str
    leases: list[tuple[Future[Lease], str]] = field(default_factory=list)
    """Each with the tenant that waits."""
    loads: list[Future[AdapterInfo]] = field(default_factory=list)
    """Futures of callers that want the files read again."""

    @property
    def is_wanted(self) -> bool:
        return bool(self.tenants())

    def tenants(self) -> set[str]:
        """Returns the tenants that wait for the adapter; "" also stands for callers of `AdapterStore.load`."""
        found = {tenant for future, tenant in self.leases if not future.done()}
        return found | {"" for future in self.loads if not future.done()}

    def take(self) -> list[Future[Any]]:
        """Removes and returns all waiting futures."""
        found = [*(future for future, _ in self.leases), *self.loads]
        self.leases, self.loads = [], []
        return found


class AdapterStore:
    """The adapters of one engine. All methods are for any thread, and none of them waits."""

    def __init__(
        self,
        read: Callable[[str], AdapterFiles],
        target: AdapterTarget,
        num_slots: int,
        list_names: Callable[[], list[str]] = list,
        read_upload: Callable[[str, str], AdapterFiles] | None = None,
    ) -> None:
        """Takes `read`, which finds and reads the files of a name, and `list_names`, which lists all names.

        `read_upload` reads the files of a folder that is to be the adapter of a name; None without a folder.
        """
        self._read = read
        self._read_upload = read_upload
        self._checking = threading.Lock()
        self._list_names = list_names
        self._listing: Future[list[str]] | None = None
        self._listed_at = 0.0
        self._target = target
        self._slots = AdapterSlots(num_slots)
        self._pending: dict[str, _Pending] = {}
        self._on_reclaim: Callable[[], None] = lambda: None
        self._num_changes = 0
        """Changes that `files_changed` has reported. A load that began before one reads the files again."""
        self._num_loads = 0
        self._num_failures = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def on_reclaim(self, callback: Callable[[], None]) -> None:
        """Has `callback` called, in the thread of the store, when leases have to be given back."""
        self._on_reclaim = callback

    def acquire(self, name: str, tenant: str = "") -> Future[Lease]:
        """Returns a lease of an adapter for a tenant, once it is loaded. The future can be cancelled until then.

        It fails with `AdapterNotFound`, `AdapterInvalid` or `EngineUnavailable`.
        """
        future: Future[Lease] = Future()
        with self._changed:
            if self._is_closing:
                raise EngineUnavailable("the engine has stopped")
            residence = self._slots.current(name)
            pending = self._pending.get(name)
            if residence is not None and (pending is None or not pending.leases):
                future.set_result(self._lease(residence, tenant))
            else:
                self._want(name).leases.append((future, tenant))
                future.add_done_callback(self._wake_up)
        return future

    def load(self, name: str) -> Future[AdapterInfo]:
        """Reads an adapter's files anew, and loads them if their content is new. Fails as `acquire` does."""
        future: Future[AdapterInfo] = Future()
        with self._changed:
            if self._is_closing:
                raise EngineUnavailable("the engine has stopped")
            self._want(name).loads.append(future)
            future.add_done_callback(self._wake_up)
        return future

    def unload(self, name: str) -> AdapterInfo:
        """Frees an adapter's slot as soon as no request uses it. Raises `AdapterNotFound` where it has none."""
        with self._changed:
            residence = self._slots.retire(name)
            if residence is None:
                raise AdapterNotFound(name, "; it is not loaded")
            self._changed.notify_all()
            return _info(residence)

    def checked_digest(self, folder: str, name: str) -> bytes:
        """Returns the digest of the files in a folder that is to be the adapter of a name, once they are checked.

        Blocks, one caller at a time. Raises `AdapterInvalid` with every problem.
        """
        if self._read_upload is None:
            raise AdapterInvalid(name, ("there is no folder of adapters",))
        with self._checking:  # one file at a time is in memory
            files = self._read_upload(folder, name)
            self._target.check(files)
            return files.digest

    def files_changed(self, name: str) -> None:
        """Has later requests use the files that the adapter has now, by any of its names. Requests that run keep
        their version."""
        with self._changed:
            self._num_changes += 1
            for other in {residence.name for residence in self._slots.residences}:
                if _may_mean_the_same(name, other):
                    self._slots.retire(other)
            if self._listing is not None and self._listing.done():
                self._listing = None
            self._changed.notify_all()

    def names(self) -> Future[list[str]]:
        """Returns the names that requests may use, as they were found within the last `LISTING_S`.

        Callers share a reading, which has a thread of its own and may hang. Do not cancel the future.
        """
        with self._changed:
            found, now = self._listing, time.monotonic()
            if found is None or (found.done() and now - self._listed_at >= LISTING_S):
                found = Future()
                threading.Thread(
                    target=self._list, args=(found,), name="kestrel-adapter-names", daemon=True
                ).start()
                self._listing, self._listed_at = found, now
            return found

    def infos(self) -> list[AdapterInfo]:
        """Returns the adapters in slots."""
        with self._changed:
            return [_info(residence) for residence in self._slots.residences]

    def reading(self) -> AdapterLoad:
        """Returns how many slots are used, and by what."""
        with self._changed:
            residences = self._slots.residences
            return AdapterLoad(
                num_slots=self._slots.num_slots,
                num_filled_slots=len(residences),
                num_used_slots=sum(residence.num_leases > 0 for residence in residences),
                num_loads=self._num_loads,
                num_failures=self._num_failures,
                num_evictions=self._slots.num_evictions,
                num_waiting=sum(bool(pending.leases) for pending in self._pending.values()),
            )

    def close(self) -> None:
        """Fails all waiting futures. A running load ends in its thread, without effect."""
        with self._changed:
            self._is_closing = True
            waiting = [future for pending in self._pending.values() for future in pending.take()]
            self._pending.clear()
            self._changed.notify_all()
        _fail(waiting, EngineUnavailable("the engine has stopped"))

    def _want(self, name: str) -> _Pending:
        pending = self._pending.get(name)
        if pending is None:
            pending = self._pending[name] = _Pending(name)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kestrel-adapters", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return pending

    def _lease(self, residence: Residence, tenant: str) -> Lease:
        self._slots.lease(residence, tenant)
        return Lease(residence, tenant, self._end_lease)

    def _end_lease(self, residence: Residence, tenant: str) -> None:
        with self._changed:
            self._slots.end_lease(residence, tenant)
            self._changed.notify_all()

    def _wake_up(self, future: Future[Any]) -> None:
        """Wakes the thread if a caller has cancelled its wait."""
        if future.cancelled():
            with self._changed:
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closing)
                if self._is_closing:
                    return
                pending = self._next_pending()
            try:
                self._load(pending)
            except KestrelError as error:
                error.__traceback__ = error.__context__ = None  # the message says everything
                self._failed(pending, error)
            except Exception as error:
                _log.exception("adapter %r cannot be loaded", pending.name)
                traceback.clear_frames(error.__traceback__)
                self._failed(pending, InternalError(error))

    def _next_pending(self) -> _Pending:
        """Returns the adapter to load next. Adapters without waiting callers come first, and are dropped. Needs the
        lock."""
        return min(self._pending.values(), key=lambda pending: self._standing_of(pending)[0])

    def _standing_of(self, pending: _Pending) -> tuple[int, str]:
        """Returns the number of slots of the waiting tenant that holds the fewest, and its name."""
        found = [(self._slots.num_held_by(tenant), tenant) for tenant in pending.tenants()]
        return min(found, default=(-1, ""))

    def _load(self, pending: _Pending) -> None:
        if not pending.is_wanted:
            self._finish(pending, None)
            return
        num_changes = self._num_changes
        files = self._read(pending.name)
        weights, digest = self._target.check(files), files.digest
        del files
        with self._changed:
            residence = self._slots.current(pending.name)
            is_known = residence is not None and residence.digest == digest
            is_outdated = self._num_changes != num_changes
            slot = None if is_known or is_outdated else self._wait_for_slot(pending)
        if is_outdated:  # the files are read again, since the adapter is still pending
            return
        if is_known:
            self._hand_out(pending)
            return
        if slot is None:
            self._finish(pending, None)
            return
        try:
            self._target.write(slot, weights)
        except BaseException:
            with self._changed:
                self._slots.give_back(slot)
            raise
        del weights
        with self._changed:
            if self._num_changes != num_changes:
                self._slots.give_back(slot)
                return
            self._num_loads += 1
            self._slots.place(slot, pending.name, digest, self._standing_of(pending)[1])
        self._hand_out(pending)
        _log.info("adapter %s is in slot %d, content %s", pending.name, slot, digest.hex()[:16])

    def _list(self, listing: Future[list[str]]) -> None:
        names: list[str] = []
        try:
            names = self._list_names()
        except Exception:  # a bug in the listing
            _log.exception("adapters cannot be listed")
        listing.set_result(names)

    def _wait_for_slot(self, pending: _Pending) -> int | None:
        """Returns a slot to write; None if no caller waits, or another adapter must come first. Needs the lock."""
        while pending.is_wanted and not self._is_closing and self._next_pending() is pending:
            slot = self._slots.reserve(self._standing_of(pending)[1])
            if slot is not None:
                return slot
            if any(residence.is_reclaimed for residence in self._slots.residences):
                self._on_reclaim()
            self._changed.wait()
        if not pending.is_wanted:
            self._slots.stop_draining()
        return None

    def _hand_out(self, pending: _Pending) -> None:
        """Gives leases of the loaded adapter to the waiting requests. Callbacks run without the lock."""
        results: list[tuple[Future[Any], Lease | AdapterInfo]] = []
        with self._changed:
            residence = self._slots.current(pending.name)
            if residence is None:  # unloaded meanwhile; it is loaded again for the waiting requests
                return
            self._pending.pop(pending.name, None)
            leases, loads = pending.leases, pending.loads
            pending.take()
            results += [
                (item, self._lease(residence, tenant))
                for item, tenant in leases
                if item.set_running_or_notify_cancel()
            ]
            results += [(item, _info(residence)) for item in loads if item.set_running_or_notify_cancel()]
        for future, result in results:
            future.set_result(result)

    def _failed(self, pending: _Pending, error: KestrelError) -> None:
        self._num_failures += 1
        if not isinstance(error, AdapterNotFound) or error.hint:
            self._finish(pending, error)
            return
        with self._changed:
            self._pending.pop(pending.name, None)
            waiting = pending.take()
        try:
            threading.Thread(
                target=self._refuse, args=(waiting, error), name="kestrel-adapter-names", daemon=True
            ).start()
        except RuntimeError:  # the system has no thread left for us
            _fail(waiting, error)

    def _refuse(self, waiting: list[Future[Any]], error: AdapterNotFound) -> None:
        """Fails these futures with a similar name, which a thread of its own looks for, so that loads continue."""
        names: list[str] = []
        with contextlib.suppress(TimeoutError):  # the folder may hang
            names = self.names().result(LISTING_S)
        _fail(waiting, AdapterNotFound(error.name, did_you_mean(error.name, names)))

    def _finish(self, pending: _Pending, error: KestrelError | None) -> None:
        """Ends a load without an adapter; `error` is None if no caller waits any more."""
        with self._changed:
            if error is None and pending.is_wanted:  # another caller has come meanwhile: load the adapter for it
                return
            self._pending.pop(pending.name, None)
            waiting = pending.take()
        if error is not None:
            _fail(waiting, error)


class AdapterPreparation(Future[Result]):
    """The preparation of a request that begins when its adapter is loaded. It can be cancelled before and after."""

    def __init__(self, lease: Future[Lease], submit: Callable[[Lease], Future[Result] | Result]) -> None:
        """Takes `submit`, which prepares the request with its adapter, or has a worker prepare it."""
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
        if not isinstance(preparation, Future):
            self.set_result(preparation)
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


def _may_mean_the_same(one: str, other: str) -> bool:
    """Returns True if two names of adapters may mean the same folder, as `a@7` and `a/checkpoint-7` do."""
    names = (AdapterName.parse(one), AdapterName.parse(other))
    folders = [
        {text} if name is None else set(name.folders()) for name, text in zip(names, (one, other), strict=True)
    ]
    return not folders[0].isdisjoint(folders[1])


def _refusal(failure: BaseException) -> BaseException:
    if isinstance(failure, RuntimeError):  # the workers are closed, or the system has no thread left for us
        return EngineUnavailable("no worker can take the request")
    return failure


def _fail(waiting: list[Future[Any]], error: KestrelError) -> None:
    for future in waiting:
        if future.set_running_or_notify_cancel():
            future.set_exception(_again(error))


def _again(error: KestrelError) -> KestrelError:
    """Returns an equal error: a shared one would collect the tracebacks of all callers."""
    cause = error.__cause__
    return InternalError(cause) if isinstance(error, InternalError) and cause is not None else copy.copy(error)


def _info(residence: Residence) -> AdapterInfo:
    return AdapterInfo(
        name=residence.name,
        digest=residence.digest.hex(),
        slot=residence.slot,
        num_requests=residence.num_leases,
        is_current=residence.is_current and not residence.is_draining,
    )
