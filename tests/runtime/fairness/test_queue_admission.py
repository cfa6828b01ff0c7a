"""B1 to B3 are the rules in the docstring of `kestrel_runtime.fairness.queue_admission`."""

import contextlib

import pytest

from kestrel_runtime.api.errors import Overloaded, QueueBound
from kestrel_runtime.api.requests import Priority
from kestrel_runtime.fairness.queue_admission import Cost, QueueAdmission, QueueLimits

ROOMY = QueueLimits(requests=1000, image_bytes=10**9, tokens=10**9)


def cost(
    tenant: str = "",
    *,
    image_bytes: int = 0,
    tokens: int = 1,
    priority: Priority = Priority.NORMAL,
    max_priority: Priority = Priority.NORMAL,
) -> Cost:
    return Cost(tenant, priority, max(priority, max_priority), image_bytes, tokens)


def fill(admission: QueueAdmission, count: int, what: Cost, now: float = 0.0) -> list[object]:
    keys: list[object] = [object() for _ in range(count)]
    for key in keys:
        admission.enter(key, what, now)
    return keys


def refusal(
    admission: QueueAdmission, what: Cost, now: float = 0.0, wait_limit_s: float | None = None
) -> Overloaded:
    before = len(admission)
    with pytest.raises(Overloaded) as caught:
        admission.enter(object(), what, now, wait_limit_s=wait_limit_s)
    assert len(admission) == before
    return caught.value


def start_regularly(admission: QueueAdmission, keys: list[object], every_s: float) -> float:
    """Start each of `keys`; returns the moment of the last."""
    for place, key in enumerate(keys):
        admission.start(key, place * every_s)
    return (len(keys) - 1) * every_s


@pytest.mark.parametrize(
    ("limits", "what", "bound"),
    [
        (QueueLimits(3, 10**9, 10**9), cost(), QueueBound.REQUESTS),
        (QueueLimits(1000, 30, 10**9), cost(image_bytes=10), QueueBound.IMAGE_BYTES),
        (QueueLimits(1000, 10**9, 30), cost(tokens=10), QueueBound.TOKENS),
    ],
)
def test_b1_each_bound_holds_and_is_named(limits: QueueLimits, what: Cost, bound: QueueBound):
    admission = QueueAdmission(limits)
    keys = fill(admission, 3, what)
    error = refusal(admission, what)
    assert (error.bound, error.limit, error.is_tenant_share) == (
        bound,
        3 if bound is QueueBound.REQUESTS else 30,
        False,
    )
    admission.leave(keys[0])
    admission.leave(keys[0])  # once is enough, twice does no harm
    fill(admission, 1, what)
    refusal(admission, what)


def test_b1_who_has_started_is_in_the_queue_no_more():
    admission = QueueAdmission(QueueLimits(1, 1, 1))
    (key,) = fill(admission, 1, cost())
    admission.start(key, 1.0)
    assert len(admission) == 0
    fill(admission, 1, cost())


def test_b1_an_empty_queue_takes_any_request():
    admission = QueueAdmission(QueueLimits(1, 10, 10))
    (key,) = fill(admission, 1, cost(image_bytes=100, tokens=100))
    admission.leave(key)
    fill(admission, 1, cost(image_bytes=100, tokens=100))
    refusal(admission, cost(image_bytes=1))


def test_b1_text_alone_is_not_refused_for_images():
    admission = QueueAdmission(QueueLimits(10, 10, 1000))
    fill(admission, 1, cost("a", image_bytes=100))
    fill(admission, 1, cost("a"))


@pytest.mark.parametrize(("num_tenants", "share"), [(1, 50), (2, 33), (4, 20), (9, 10)])
def test_b2_however_many_flood_the_queue_a_newcomer_finds_room(num_tenants: int, share: int):
    admission = QueueAdmission(QueueLimits(100, 10**9, 10**9))
    held = dict.fromkeys(range(num_tenants), 0)
    for _ in range(200):
        for tenant in held:
            with contextlib.suppress(Overloaded):
                admission.enter(object(), cost(str(tenant)), 0.0)
                held[tenant] += 1
    assert all(abs(count - share) <= 1 for count in held.values())
    assert refusal(admission, cost("0")).is_tenant_share
    fill(admission, 1, cost("newest"))


def test_b2_a_flood_of_large_images_leaves_room_for_other_images():
    admission = QueueAdmission(QueueLimits(100, 100, 10**9))
    fill(admission, 5, cost("flood", image_bytes=10))
    error = refusal(admission, cost("flood", image_bytes=10))
    assert (error.bound, error.is_tenant_share) == (QueueBound.IMAGE_BYTES, True)
    fill(admission, 1, cost("modest", image_bytes=40))


def test_b2_callers_that_are_not_told_apart_may_fill_the_queue():
    admission = QueueAdmission(QueueLimits(10, 10**9, 10**9))
    fill(admission, 10, cost(""))
    assert not refusal(admission, cost("")).is_tenant_share


def test_b3_a_request_that_would_outlast_its_wait_limit_is_refused_with_the_wait():
    admission = QueueAdmission(ROOMY)
    now = start_regularly(admission, fill(admission, 30, cost())[:10], every_s=0.5)
    error = refusal(admission, cost(), now, wait_limit_s=9.9)  # twenty are before it
    assert (error.bound, error.limit) == (QueueBound.WAIT, 9.9)
    assert error.retry_after_s == pytest.approx(10.0)
    admission.enter(object(), cost(), now, wait_limit_s=10.1)
    admission.enter(object(), cost(), now)  # who has all the time in the world is let in


def test_b3_an_empty_queue_refuses_no_request_for_the_wait():
    admission = QueueAdmission(ROOMY)
    now = start_regularly(admission, fill(admission, 10, cost()), every_s=0.5)
    admission.enter(object(), cost(), now, wait_limit_s=0.001)


def test_b3_without_measurements_no_request_is_refused_for_the_wait():
    admission = QueueAdmission(ROOMY)
    now = start_regularly(admission, fill(admission, 30, cost())[:8], every_s=5.0)  # seven intervals
    assert admission.estimated_wait_s(cost(), now) is None
    admission.enter(object(), cost(), now, wait_limit_s=0.001)


def test_b3_old_evidence_does_not_count():
    admission = QueueAdmission(ROOMY)
    now = start_regularly(admission, fill(admission, 30, cost())[:10], every_s=0.5)
    assert admission.estimated_wait_s(cost(), now + 61.0) is None


def test_b3_a_quiet_engine_is_not_taken_for_a_slow_one():
    admission = QueueAdmission(ROOMY)
    for second in range(50):  # one request a second, started as soon as it comes
        admission.start(fill(admission, 1, cost())[0], float(second))
    fill(admission, 20, cost())
    admission.enter(object(), cost(), 50.0, wait_limit_s=1.0)


def test_b3_only_those_that_start_before_it_count():
    admission = QueueAdmission(ROOMY)
    urgent = cost("urgent", priority=Priority.INTERACTIVE)
    fill(admission, 30, cost("flood", priority=Priority.BATCH))
    fill(admission, 30, cost("flood"))
    fill(admission, 2, cost("modest"))
    now = start_regularly(admission, fill(admission, 9, urgent), every_s=1.0)
    assert admission.estimated_wait_s(urgent, now) == 2.0  # a turn of each of the others
    preceding = cost("urgent", priority=Priority.INTERACTIVE, max_priority=Priority.INTERACTIVE)
    assert admission.estimated_wait_s(preceding, now) == 0.0
    # Two of its own, and a turn of the flood's for each of these and for itself.
    assert admission.estimated_wait_s(cost("modest"), now) == pytest.approx(5.0)
    # Sixty of its own, and both of the other's.
    assert admission.estimated_wait_s(cost("flood", priority=Priority.BATCH), now) == pytest.approx(62.0)


def test_b3_the_wait_includes_turns_of_others_who_send_one_request_after_the_other():
    admission = QueueAdmission(ROOMY)
    keys = fill(admission, 100, cost("flood"))
    now = 0.0
    for key in keys[:20]:  # every second start is of a caller who asks again once answered
        admission.start(key, now)
        (other,) = fill(admission, 1, cost("steady"))
        admission.start(other, now + 1.0)
        now += 2.0
    assert admission.estimated_wait_s(cost("flood"), now) == pytest.approx(160.0)  # 80 of its own, each takes 2 s
    assert refusal(admission, cost("flood"), now, wait_limit_s=159.0).bound is QueueBound.WAIT
    admission.enter(object(), cost("flood"), now, wait_limit_s=161.0)
    assert admission.estimated_wait_s(cost("steady"), now) == pytest.approx(1.0)
    # What has starved the flood's requests says nothing about others of the same caller.
    urgent = cost("flood", priority=Priority.INTERACTIVE, max_priority=Priority.INTERACTIVE)
    assert admission.estimated_wait_s(urgent, now) == 0.0


def test_the_time_to_try_again_is_measured():
    admission = QueueAdmission(QueueLimits(30, 10**9, 10**9))
    keys = fill(admission, 30, cost())
    assert refusal(admission, cost()).retry_after_s == 1.0  # nothing is known yet
    now = start_regularly(admission, keys[:10], every_s=0.5)
    fill(admission, 10, cost())
    assert refusal(admission, cost(), now).retry_after_s == pytest.approx(30 / 2 * 0.5)
