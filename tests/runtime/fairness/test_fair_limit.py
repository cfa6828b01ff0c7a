from random import Random

from kestrel_runtime.fairness.fair_limit import FairLimit


def taken(limit: FairLimit, tenant: str) -> int:
    """How many a tenant gets, one after the other."""
    count = 0
    while limit.take(tenant):
        count += 1
    return count


def test_callers_that_are_not_distinguished_may_take_all():
    limit = FairLimit(6)
    assert taken(limit, "") == 6
    assert limit.is_full


def test_a_tenant_alone_gets_half_and_another_always_finds_one():
    limit = FairLimit(6)
    assert taken(limit, "alice") == 3
    assert taken(limit, "bob") == 2
    assert taken(limit, "carol") == 1
    assert limit.is_full


def test_what_is_given_back_can_be_taken_again():
    limit = FairLimit(2)
    assert taken(limit, "alice") == 1
    limit.give_back("alice")
    assert taken(limit, "bob") == 1
    assert taken(limit, "") == 1
    limit.give_back("")
    limit.give_back("bob")
    assert not limit.is_full
    assert taken(limit, "") == 2


def test_at_any_demand_the_limit_holds_and_a_new_tenant_finds_room_until_a_third_has_come():
    random = Random(1)
    limit, held = FairLimit(1000), {"a": 0, "b": 0}
    for _ in range(5000):
        tenant, amount = random.choice("ab"), random.randrange(1, 40)
        if random.random() < 0.4:
            amount = min(amount, held[tenant])
            limit.give_back(tenant, amount)
            held[tenant] -= amount
        elif limit.take(tenant, amount):
            held[tenant] += amount
        assert limit.num_taken == sum(held.values()) <= 1000
        assert (limit.taken_by("a"), limit.taken_by("b")) == (held["a"], held["b"])
        assert limit.has_share("c")
        # Of a share that is not quite taken, the last amount may exceed it.
        assert max(held.values()) <= 500 + 40
