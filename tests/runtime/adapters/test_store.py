"""Loading beside requests: who waits, who is refused, and what a name means while slots change."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from kestrel_runtime.adapters.files import AdapterFiles
from kestrel_runtime.adapters.store import AdapterPreparation, AdapterStore, Lease
from kestrel_runtime.api.errors import AdapterInvalid, AdapterNotFound, EngineUnavailable, InternalError

MAX_WAIT_S = 30.0


class Target:
    """Slots that hold the digest of what was written."""

    max_file_bytes = 1000

    def __init__(self) -> None:
        self.slots: dict[int, bytes] = {}

    def check(self, files: AdapterFiles) -> bytes:
        if files.name == "broken":
            raise AdapterInvalid(files.name, ("is broken",))
        if files.name == "a bug":
            raise ZeroDivisionError
        return files.digest

    def write(self, slot: int, weights: bytes) -> None:
        self.slots[slot] = weights


class Files:
    """Adapters by name; reading one can be held up."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = dict.fromkeys(("first", "second", "third", "broken", "a bug"), 1)
        self.may_read = threading.Event()
        self.may_read.set()
        self.is_reading = threading.Event()
        self.may_list = threading.Event()
        self.may_list.set()

    def names(self) -> list[str]:
        assert self.may_list.wait(MAX_WAIT_S)
        return sorted(self.versions)

    def read(self, name: str) -> AdapterFiles:
        self.is_reading.set()
        assert self.may_read.wait(MAX_WAIT_S)
        if name not in self.versions:
            raise AdapterNotFound(name)
        return AdapterFiles(name, None, {}, f"{name} {self.versions[name]}".encode())


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def new_store(files: Files, target: Target) -> Iterator[Callable[[int], AdapterStore]]:
    stores: list[AdapterStore] = []

    def new(num_slots: int) -> AdapterStore:
        stores.append(AdapterStore(files.read, target, num_slots, files.names))
        return stores[-1]

    yield new
    files.may_read.set()
    files.may_list.set()
    for store in stores:
        store.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + MAX_WAIT_S
    while not is_so():
        assert time.monotonic() < end
        threading.Event().wait(0.001)


def leased(future: Future[Lease]) -> Lease:
    return future.result(MAX_WAIT_S)


def test_a_lease_is_of_what_was_written(new_store: Callable[[int], AdapterStore], target: Target):
    store = new_store(2)
    lease = leased(store.acquire("first"))
    assert target.slots[lease.slot] == lease.digest == b"first 1"
    assert store.acquire("first").done(), "it is loaded now"
    assert store.reading().num_loads == 1


@pytest.mark.parametrize(("name", "meant"), [("frist", "; did you mean first?"), ("zzz", "")])
def test_what_may_have_been_meant_by_an_unknown_name_is_suggested(
    new_store: Callable[[int], AdapterStore], name: str, meant: str
):
    with pytest.raises(AdapterNotFound) as caught:
        new_store(1).acquire(name).result(MAX_WAIT_S)
    assert str(caught.value) == f"no adapter named {name!r}{meant}"


def test_an_unknown_name_holds_up_no_other_adapter(new_store: Callable[[int], AdapterStore], files: Files):
    store = new_store(1)
    files.may_list.clear()
    unknown = store.acquire("frist")
    leased(store.acquire("first"))
    assert str(unknown.exception(MAX_WAIT_S)) == "no adapter named 'frist'", "the folder hangs"


def test_requests_of_one_adapter_wait_for_one_load(new_store: Callable[[int], AdapterStore], files: Files):
    store = new_store(2)
    files.may_read.clear()
    waiting = [store.acquire("first") for _ in range(3)]
    assert store.reading().num_waiting == 1
    files.may_read.set()
    assert len({leased(future).slot for future in waiting}) == 1
    assert store.reading().num_loads == 1


@pytest.mark.parametrize(
    ("name", "error"), [("broken", AdapterInvalid), ("absent", AdapterNotFound), ("a bug", InternalError)]
)
def test_a_load_that_fails_fails_those_who_wait_and_no_others(
    new_store: Callable[[int], AdapterStore], name: str, error: type[Exception]
):
    store = new_store(1)
    refused = store.acquire(name)
    assert isinstance(refused.exception(MAX_WAIT_S), error)
    assert leased(store.acquire("first")).digest == b"first 1"
    assert (store.reading().num_failures, store.reading().num_loads) == (1, 1)


def test_new_files_are_used_by_later_requests_alone(new_store: Callable[[int], AdapterStore], files: Files):
    store = new_store(2)
    lease = leased(store.acquire("first"))
    assert store.names().result(MAX_WAIT_S) == files.names()
    files.versions.update({"first": 2, "new": 1})
    store.files_changed("first")
    assert "new" in store.names().result(MAX_WAIT_S), "the list is read again at once"
    later = leased(store.acquire("first"))
    assert (lease.digest, later.digest) == (b"first 1", b"first 2")
    assert lease.slot != later.slot
    store.files_changed("absent")


def test_files_that_are_replaced_while_they_are_read_are_read_again(
    new_store: Callable[[int], AdapterStore], files: Files, target: Target, monkeypatch: pytest.MonkeyPatch
):
    store, write = new_store(1), target.write

    def write_and_replace(slot: int, weights: bytes) -> None:
        write(slot, weights)
        if files.versions["first"] < 3:
            files.versions["first"] += 1
            store.files_changed("first")

    monkeypatch.setattr(target, "write", write_and_replace)
    lease = leased(store.acquire("first"))
    assert target.slots[lease.slot] == lease.digest == b"first 3"
    assert store.reading().num_loads == 1


def test_a_check_of_an_upload_loads_nothing(files: Files, target: Target):
    def read(folder: str, name: str) -> AdapterFiles:
        return AdapterFiles(name, None, {}, folder.encode())

    store = AdapterStore(files.read, target, 1, files.names, read)
    try:
        assert store.checked_digest("folder", "first") == b"folder"
        with pytest.raises(AdapterInvalid, match="is broken"):
            store.checked_digest("folder", "broken")
        assert (store.infos(), target.slots) == ([], {})
    finally:
        store.close()


def test_all_slots_in_use_are_given_in_turn(new_store: Callable[[int], AdapterStore]):
    store = new_store(1)
    first = leased(store.acquire("first"))
    second = store.acquire("second")
    wait_until(lambda: not store.infos()[0].is_current)
    again = store.acquire("first")
    assert not second.done()
    first.end()
    held = leased(second)
    assert held.digest == b"second 1"
    assert not again.done()
    held.end()
    assert leased(again).digest == b"first 1"


def test_a_tenant_that_holds_fewer_slots_comes_first_and_gets_one_back(
    new_store: Callable[[int], AdapterStore], files: Files
):
    files.versions |= {f"flood {number}": 1 for number in range(6)}
    store = new_store(2)
    is_reclaiming = threading.Event()
    store.on_reclaim(is_reclaiming.set)
    flood = [leased(store.acquire(f"flood {number}", "flood")) for number in range(2)]
    waiting = [store.acquire(f"flood {number}", "flood") for number in range(2, 6)]
    modest = store.acquire("first", "modest")
    assert is_reclaiming.wait(MAX_WAIT_S)
    assert [lease.is_reclaimed for lease in flood] == [True, False]
    flood[0].end()
    assert not flood[0].is_reclaimed
    assert leased(modest).tenant == "modest"
    assert not any(future.done() for future in waiting)
    for lease in (flood[1], modest.result()):
        lease.end()
    for future in waiting:
        leased(future).end()


def test_a_caller_who_leaves_frees_the_way(new_store: Callable[[int], AdapterStore]):
    store = new_store(1)
    first = leased(store.acquire("first"))
    second = store.acquire("second")
    wait_until(lambda: not store.infos()[0].is_current)
    assert second.cancel()
    assert leased(store.acquire("first")).digest == b"first 1", "what drained is leased again, or loaded again"
    first.end()


def test_a_new_version_under_the_same_name(new_store: Callable[[int], AdapterStore], files: Files):
    store = new_store(2)
    old = leased(store.acquire("first"))
    files.versions["first"] = 2
    assert leased(store.acquire("first")).digest == old.digest, "files are read when they are loaded"
    info = store.load("first").result(MAX_WAIT_S)
    new = leased(store.acquire("first"))
    assert new.digest == b"first 2" == bytes.fromhex(info.digest)
    assert {item.digest: item.is_current for item in store.infos()} == {
        old.digest.hex(): False,
        new.digest.hex(): True,
    }
    assert store.load("first").result(MAX_WAIT_S).digest == info.digest, "the same content stays where it is"
    assert store.reading().num_loads == 2


def test_a_version_that_is_broken_leaves_the_old_one(new_store: Callable[[int], AdapterStore], files: Files):
    store = new_store(2)
    leased(store.acquire("first")).end()
    del files.versions["first"]
    assert isinstance(store.load("first").exception(MAX_WAIT_S), AdapterNotFound)
    assert store.acquire("first").done()


def test_an_adapter_is_unloaded_when_its_last_request_has_ended(new_store: Callable[[int], AdapterStore]):
    store = new_store(1)
    lease = leased(store.acquire("first"))
    assert store.unload("first").num_requests == 1
    assert [item.is_current for item in store.infos()] == [False]
    with pytest.raises(AdapterNotFound):
        store.unload("first")
    lease.end()
    lease.end()
    assert store.infos() == []
    assert leased(store.acquire("first")).digest == b"first 1", "it is loaded again when it is named"


def test_closing_fails_who_waits(new_store: Callable[[int], AdapterStore], files: Files):
    store = new_store(1)
    files.may_read.clear()
    waiting = store.acquire("first"), store.load("second")
    assert files.is_reading.wait(MAX_WAIT_S)
    store.close()
    for future in waiting:
        assert isinstance(future.exception(MAX_WAIT_S), EngineUnavailable)
    with pytest.raises(EngineUnavailable):
        store.acquire("first")


class Leased:
    def __init__(self) -> None:
        self.num_ends = 0

    def end(self) -> None:
        self.num_ends += 1


def test_a_preparation_is_cancelled_before_and_after_its_adapter_is_there():
    waiting: Future[Lease] = Future()
    before: AdapterPreparation[int] = AdapterPreparation(waiting, lambda lease: Future())
    assert before.cancel()
    assert (waiting.cancelled(), before.cancelled()) == (True, True)
    lease, adapter, work = Leased(), Future(), Future()
    after: AdapterPreparation[int] = AdapterPreparation(adapter, lambda _: work)
    adapter.set_result(lease)
    assert after.cancel()
    assert (work.cancelled(), after.cancelled(), lease.num_ends) == (True, True, 1)


def test_a_preparation_that_fails_ends_its_lease_and_one_that_succeeds_does_not():
    for outcome in (ValueError(), RuntimeError(), 7):
        lease, adapter, work = Leased(), Future(), Future()
        preparation: AdapterPreparation[int] = AdapterPreparation(adapter, lambda _, work=work: work)
        adapter.set_result(lease)
        if isinstance(outcome, int):
            work.set_result(outcome)
            assert (preparation.result(), lease.num_ends) == (7, 0)
        else:
            work.set_exception(outcome)
            assert (preparation.exception(), lease.num_ends) == (outcome, 1)


def test_callers_share_one_reading_of_the_names(files: Files, target: Target):
    readings: list[str] = []
    may_go_on = threading.Event()

    def list_names() -> list[str]:
        readings.append("read")
        assert may_go_on.wait(MAX_WAIT_S)
        return ["gold"]

    store = AdapterStore(files.read, target, 1, list_names)
    waiting = [store.names() for _ in range(3)]
    assert not any(future.done() for future in waiting)
    may_go_on.set()
    assert [future.result(MAX_WAIT_S) for future in waiting] == [["gold"]] * 3
    assert store.names().result(0) == ["gold"]
    assert readings == ["read"]


def test_names_are_read_again_and_a_bug_in_that_ends_nothing(
    files: Files, target: Target, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kestrel_runtime.adapters.store.LISTING_S", 0.0)
    results = iter((["gold"], None, ["gold", "new"]))

    def list_names() -> list[str]:
        names = next(results)
        if names is None:
            raise ZeroDivisionError
        return names

    store = AdapterStore(files.read, target, 1, list_names)
    assert [store.names().result(MAX_WAIT_S) for _ in range(3)] == [["gold"], [], ["gold", "new"]]
