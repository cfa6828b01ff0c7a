"""Whatever happens, a lease's slot holds the version that was leased, and slots are neither lost nor shared."""

import random
from collections import Counter
from itertools import count

import pytest

from kestrel_runtime.adapters.slots import AdapterSlots, Residence

NAMES = [f"tenant-{number}" for number in range(8)]


def placed(slots: AdapterSlots, name: str, version: int = 0) -> Residence:
    slot = slots.reserve()
    assert slot is not None
    return slots.place(slot, name, bytes([version]))


def test_the_adapter_that_was_used_longest_ago_leaves_for_another():
    slots = AdapterSlots(2)
    first, second = placed(slots, "first"), placed(slots, "second")
    for residence in (second, first):
        slots.lease(residence)
        slots.end_lease(residence)
    third = placed(slots, "third")
    assert third.slot == second.slot
    assert (slots.current("second"), slots.current("first")) == (None, first)
    assert slots.num_evictions == 1


def test_an_adapter_in_use_drains_where_no_slot_is_free():
    slots = AdapterSlots(1)
    first = placed(slots, "first")
    slots.lease(first)
    assert slots.reserve() is None
    assert slots.current("first") is None, "it gets no new leases"
    slots.end_lease(first)
    assert slots.reserve() == first.slot


def test_an_adapter_that_drained_for_nothing_is_leased_again():
    slots = AdapterSlots(1)
    first = placed(slots, "first")
    slots.lease(first)
    assert slots.reserve() is None
    slots.stop_draining()
    assert slots.current("first") is first
    assert slots.num_evictions == 0


def test_a_new_version_leaves_the_old_one_to_those_who_have_it():
    slots = AdapterSlots(2)
    old = placed(slots, "name", 1)
    slots.lease(old)
    new = placed(slots, "name", 2)
    assert new.slot != old.slot
    assert slots.current("name") is new
    assert old in slots.residences
    slots.end_lease(old)
    assert slots.residences == (new,)


def held(slots: AdapterSlots, name: str, tenant: str) -> Residence:
    residence = placed(slots, name)
    slots.lease(residence, tenant)
    return residence


def test_the_idle_adapter_that_leaves_is_of_the_tenant_with_most_slots():
    slots = AdapterSlots(3)
    modest = held(slots, "modest", "modest")
    flood = [held(slots, f"flood {number}", "flood") for number in range(2)]
    for residence in (modest, *flood):
        slots.end_lease(residence, residence.last_tenant)
    assert slots.reserve("flood") == flood[0].slot, "the other was used longer ago"


def test_a_tenant_without_a_slot_reclaims_one_of_the_tenant_with_most():
    slots = AdapterSlots(4)
    residences = [held(slots, "other", "other")]
    residences += [held(slots, f"flood {number}", "flood") for number in range(3)]
    assert slots.reserve("modest") is None
    assert [item.is_reclaimed for item in residences] == [False, True, False, False]
    assert slots.reserve("third") is None
    assert [item.is_reclaimed for item in residences] == [False, True, False, False], "one after the other"
    slots.end_lease(residences[1], "flood")
    assert slots.reserve("modest") == residences[1].slot


def test_nobody_reclaims_a_slot_for_more_than_its_share():
    slots = AdapterSlots(4)
    residences = [
        held(slots, f"{tenant} {number}", tenant) for tenant in ("flood", "modest") for number in range(2)
    ]
    assert slots.reserve("modest") is None
    assert not any(item.is_reclaimed for item in residences)
    assert [item.is_draining for item in residences] == [True, False, False, False], "it takes its turn"


def test_a_slot_that_drains_for_its_own_tenant_is_reclaimed_for_another():
    slots = AdapterSlots(2)
    residences = [held(slots, f"flood {number}", "flood") for number in range(2)]
    assert slots.reserve("flood") is None
    assert [item.is_draining for item in residences] == [True, False]
    assert slots.reserve("modest") is None
    assert [item.is_reclaimed for item in residences] == [True, False]


def test_an_adapter_that_others_use_too_is_not_reclaimed():
    slots = AdapterSlots(2)
    residences = [held(slots, f"flood {number}", "flood") for number in range(2)]
    for residence in residences:
        slots.lease(residence, "other")
    slots.end_lease(residences[0], "other")
    assert slots.reserve("modest") is None
    assert [item.is_reclaimed for item in residences] == [True, False]


class Model:
    """What a device would hold, and what each request must read."""

    def __init__(self, num_slots: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.slots = AdapterSlots(num_slots)
        self.content: dict[int, bytes] = {}  # what was last written to each slot
        self.leases: list[tuple[Residence, str, bytes]] = []
        self.reserved: list[tuple[int, str]] = []
        self.versions = count(1)
        self.wanted: dict[str, bytes] = {}  # the version that a name means
        self.done: Counter[str] = Counter()

    def lease(self) -> None:
        name = self.chance.choice(NAMES)
        residence = self.slots.current(name)
        if residence is not None:
            assert residence.digest == self.wanted[name], "new requests get the newest version"
            self.slots.lease(residence)
            self.leases.append((residence, name, residence.digest))
            self.done["lease"] += 1

    def end_lease(self) -> None:
        if self.leases:
            residence, _, _ = self.leases.pop(self.chance.randrange(len(self.leases)))
            self.slots.end_lease(residence)
            self.done["end"] += 1

    def reserve(self) -> None:
        slot = self.slots.reserve()
        if slot is None:
            self.done["full"] += 1
            return
        assert slot not in {residence.slot for residence, _, _ in self.leases}, "a request reads it"
        assert slot not in {other for other, _ in self.reserved}, "reserved twice"
        self.content[slot] = b"half written"
        self.reserved.append((slot, self.chance.choice(NAMES)))

    def place(self) -> None:
        if self.reserved:
            slot, name = self.reserved.pop(self.chance.randrange(len(self.reserved)))
            digest = next(self.versions).to_bytes(8, "big")
            self.content[slot] = self.wanted[name] = digest
            self.slots.place(slot, name, digest)
            self.done["place"] += 1

    def give_back(self) -> None:
        if self.reserved:
            slot, _ = self.reserved.pop()
            self.slots.give_back(slot)

    def retire(self) -> None:
        self.done["retire"] += self.slots.retire(self.chance.choice(NAMES)) is not None

    def check(self) -> None:
        for residence, name, digest in self.leases:
            assert self.content[residence.slot] == digest == residence.digest, f"{name} reads another adapter"
        places = [residence.slot for residence in self.slots.residences] + [slot for slot, _ in self.reserved]
        assert len(set(places)) == len(places) <= self.slots.num_slots
        assert len(places) + len(self.slots._free) == self.slots.num_slots, "a slot is lost"
        current = [item.name for item in self.slots.residences if item.is_current]
        assert len(set(current)) == len(current), "a name means one version"
        held = Counter(id(residence) for residence, _, _ in self.leases)
        assert all(item.num_leases == held[id(item)] for item in self.slots.residences)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 8])
def test_no_request_ever_reads_another_adapter(num_slots: int):
    """Ten thousand random operations on each number of slots."""
    model = Model(num_slots, seed=num_slots)
    kinds = [model.lease, model.end_lease, model.reserve, model.place, model.give_back, model.retire]
    weights = [30, 27, 12, 12, 2, 3]
    for _ in range(10_000):
        model.chance.choices(kinds, weights)[0]()
        if model.chance.random() < 0.02:
            model.slots.stop_draining()
        model.check()
    assert min(model.done[kind] for kind in ("lease", "end", "place", "retire", "full")) > 10
    for residence, _, _ in model.leases:
        model.slots.end_lease(residence)
    model.leases.clear()
    for _ in range(num_slots - len(model.reserved)):
        assert model.slots.reserve() is not None, "with no request left, each slot can be had"
