from kestrel_grpc.wire.shares import Shares


def taken(shares: Shares, tenant: str) -> int:
    """How many a tenant gets."""
    count = 0
    while shares.take(tenant):
        count += 1
    return count


def test_callers_that_are_not_told_apart_may_take_all():
    shares = Shares(6)
    assert taken(shares, "") == 6
    assert shares.is_full


def test_a_tenant_alone_gets_half_and_another_always_finds_one():
    shares = Shares(6)
    assert taken(shares, "alice") == 3
    assert taken(shares, "bob") == 2
    assert taken(shares, "carol") == 1
    assert shares.is_full


def test_what_is_given_back_can_be_taken_again():
    shares = Shares(2)
    assert taken(shares, "alice") == 1
    shares.give_back("alice")
    assert taken(shares, "bob") == 1
    assert taken(shares, "") == 1
    shares.give_back("")
    shares.give_back("bob")
    assert not shares.is_full
    assert taken(shares, "") == 2
