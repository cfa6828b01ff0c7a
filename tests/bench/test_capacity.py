"""The model of capacity: against closed formulas, against what was measured, and the page that shows its tables."""

import json
import math
import random
from itertools import repeat

import numpy as np
import pytest

from bench.capacity import (
    BALANCE_FACTOR,
    HOSTS,
    LIMIT_S,
    RESULTS,
    Setting,
    Table,
    as_markdown,
    hosts_table,
    many_hosts,
    sent,
    setting_of,
    settings,
    tables,
)
from bench.harness.envoy import CONFIGURATION
from bench.harness.queueing import (
    Arrival,
    Curve,
    Mix,
    at_random,
    by_image,
    distinct_servers,
    least_requests,
    simulate,
)
from bench.harness.workload import returning
from tests.reference_fixtures import CHECKOUT

ONE_AT_A_TIME = Curve((1,), (0.1,))
"""10 requests a second, however many are there: the server of M/M/1 and M/D/1."""
ALL_AT_ONCE = Curve((1, 5_000), (0.1, 0.1))
"""Requests do not slow each other down."""
MANY = 10**9


@pytest.fixture(scope="module")
def float8() -> Setting:
    return settings()[1]


@pytest.fixture(scope="module")
def printed() -> dict[str, Table]:
    return dict(tables())


def poisson(rate_per_s: float, number: int) -> list[Arrival]:
    chance, due_s, found = random.Random(1), 0.0, []
    for image in range(number):
        due_s += chance.expovariate(rate_per_s)
        found.append(Arrival(due_s, image))
    return found


def times_s(curve: Curve, rate_per_s: float, number: int, *, is_random_work: bool) -> np.ndarray:
    chance = random.Random(2)
    works = iter(lambda: chance.expovariate(1.0), None) if is_random_work else repeat(1.0)
    arrivals = poisson(rate_per_s, number)
    served = simulate(arrivals, 1, curve, curve, at_random(0), max_images=1, works=works)
    return np.array([one.total_s for one in served])


def test_the_number_of_requests_is_geometric_where_one_server_does_one_after_another():
    found = Mix(((1.0, ONE_AT_A_TIME),)).at_once(8.0)
    assert found is not None
    assert found[:50] == pytest.approx([0.2 * 0.8**n for n in range(50)])


@pytest.mark.parametrize("rate_per_s", [1.0, 5.0, 9.0])
def test_the_mean_time_of_one_server_is_that_of_m_m_1(rate_per_s: float):
    assert Mix(((1.0, ONE_AT_A_TIME),)).mean_s(rate_per_s) == pytest.approx(1 / (10.0 - rate_per_s))


@pytest.mark.parametrize("is_random_work", [True, False])
def test_simulated_requests_of_random_and_of_equal_work_take_that_mean_time(is_random_work: bool):
    simulated = times_s(ONE_AT_A_TIME, 5.0, 20_000, is_random_work=is_random_work)
    assert simulated.mean() == pytest.approx(1 / (10.0 - 5.0), rel=0.05)


def test_requests_that_do_not_slow_each_other_down_are_as_many_as_poisson_says():
    mix = Mix(((1.0, ALL_AT_ONCE),))
    found = mix.at_once(50.0)
    assert found is not None
    assert found[:20] == pytest.approx([math.exp(-5.0) * 5.0**n / math.factorial(n) for n in range(20)])
    assert mix.quantile_s(50.0) == pytest.approx(0.1)
    assert times_s(ALL_AT_ONCE, 50.0, 1_000, is_random_work=False) == pytest.approx(0.1)


def test_a_request_that_comes_rarely_takes_the_time_of_one_alone(float8: Setting):
    for curve in float8.curves.values():
        assert Mix(((1.0, curve),)).quantile_s(1e-3) == pytest.approx(curve.seconds[0])


def test_a_server_that_gets_more_than_it_answers_does_not_keep_up():
    mix = Mix(((1.0, ONE_AT_A_TIME),))
    assert mix.at_once(10.0) is None
    assert mix.quantile_s(10.1) == math.inf
    assert mix.rate_within(0.05) == 0.0, "one request alone takes longer"


def test_between_measurements_the_time_is_interpolated_and_beyond_them_the_rate_stays():
    curve = Curve.of_rates({1: 10.0, 3: 15.0})
    assert curve.times(6) == pytest.approx([0.1, 0.15, 0.2, 4 / 15, 5 / 15, 6 / 15])


@pytest.mark.parametrize("at_once", [(), (2,), (1, 1), (1, 4, 2)])
def test_a_curve_that_does_not_begin_with_one_and_ascend_is_refused(at_once: tuple[int, ...]):
    with pytest.raises(ValueError, match="begins with one"):
        Curve(at_once, (0.1,) * len(at_once))


@pytest.mark.parametrize(
    ("workload", "new_share"), [("direct", 1.0), ("direct", 0.2), ("cot", 1.0), ("cot", 0.2), ("long", 1.0)]
)
def test_the_formula_of_the_99th_percentile_agrees_with_the_simulation(
    float8: Setting, workload: str, new_share: float
):
    mix = float8.mix(workload, new_share)
    rate_per_s = 0.95 * mix.rate_within(LIMIT_S)
    chance, due_s, arrivals = random.Random(3), 0.0, []
    for number in range(20_000):
        due_s += chance.expovariate(rate_per_s)
        # The image of many requests is known.
        arrivals.append(Arrival(due_s, number if chance.random() < new_share else -1))
    new, known = float8.curves[workload], float8.known(workload)
    served = simulate(arrivals, 1, new, known, at_random(0), max_images=MANY)
    p99_s = float(np.percentile([one.total_s for one in served], 99))
    assert mix.quantile_s(rate_per_s) == pytest.approx(p99_s, rel=0.2)


def test_more_servers_never_answer_later(float8: Setting):
    mix = float8.mix("cot", 0.5)
    times = [mix.quantile_s(500.0 / servers) for servers in range(4, 40)]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


@pytest.mark.parametrize("is_by_image", [True, False])
def test_the_number_of_gpus_suffices_and_one_less_does_not(float8: Setting, is_by_image: bool):
    gpus = float8.gpus(1_000.0, "direct", 5, is_by_image=is_by_image, limit_s=LIMIT_S)
    assert gpus is not None

    def p99_s(num_gpus: int) -> float:
        spread = 1 if is_by_image else num_gpus
        return float8.mix("direct", distinct_servers(5, spread) / 5).quantile_s(1_000.0 / num_gpus)

    assert p99_s(gpus) <= LIMIT_S < p99_s(gpus - 1)


def test_no_number_of_gpus_answers_within_less_than_one_request_takes(float8: Setting):
    assert float8.gpus(1.0, "long", 1, is_by_image=True, limit_s=0.1) is None


def test_routing_by_image_hits_with_every_repeat_and_random_routing_as_often_as_the_formula_says():
    blocks = [image for block in range(20) for image in returning(block, 5)]
    arrivals = [Arrival(0.01 * place, image) for place, image in enumerate(blocks)]

    def new_share(route) -> float:
        served = simulate(arrivals, 8, ONE_AT_A_TIME, ONE_AT_A_TIME, route, max_images=MANY)
        return sum(not one.is_known for one in served) / len(served)

    assert new_share(by_image(None)) == pytest.approx(1 / 5)
    assert new_share(at_random(0)) == pytest.approx(distinct_servers(5, 8) / 5, rel=0.03)
    assert new_share(by_image(BALANCE_FACTOR)) < 0.7 * new_share(least_requests(0))


def test_a_server_gets_no_more_than_its_bound_of_a_popular_image():
    route, running = by_image(1.5), [0] * 4
    for total in range(1, 101):
        running[route(7, running)] += 1
        assert max(running) <= math.ceil(1.5 * total / 4) + 1
    assert by_image(None)(7, [50, 50, 50, 50]) == by_image(None)(7, [0, 0, 0, 0])


def test_the_bound_is_that_of_the_configuration_of_envoy():
    assert f"hash_balance_factor: {100 * BALANCE_FACTOR:.0f}" in CONFIGURATION.read_text(encoding="utf-8")


def test_a_server_forgets_the_image_that_was_unused_for_longest():
    images = [1, 2, 1, 3, 1, 2]
    arrivals = [Arrival(float(place), image) for place, image in enumerate(images)]
    served = simulate(arrivals, 1, ONE_AT_A_TIME, ONE_AT_A_TIME, at_random(0), max_images=2)
    assert [one.is_known for one in served] == [False, False, True, False, True, False]


def test_the_moments_of_a_measured_open_loop_are_known():
    rows = [
        row for row in json.loads((RESULTS / "serve-moondream2-h100.json").read_text())["rows"] if row["is_open"]
    ]
    for row in rows:
        assert len(sent(row["load"], row["window_s"], num_processes=4)) == row["num_requests"]
    assert len(rows) == 5


def test_two_gpus_answer_what_the_curve_of_one_says(float8: Setting):
    rows = json.loads((RESULTS / "gpus-moondream2-h100.json").read_text())["rows"]
    for workload in ("direct", "cot"):
        curve = float8.curves[workload]
        (measured, _) = (row["requests_per_s"] for row in rows[f"{workload}:128"]["devices-all"])
        assert 2 * 64 / curve.times(64)[-1] == pytest.approx(measured, rel=0.05)


def test_mixes_that_were_measured_are_answered_no_slower_than_the_model_says():
    # One H200, one process, 64 at once, from bench/results/details.md: by share of hits, requests/s.
    new, known = Curve.of_rates({1: 55.3, 64: 103.8}), Curve.of_rates({1: 177.0, 64: 666.0})
    for hit_share, measured_per_s in ((0.25, 144.0), (0.62, 264.0)):
        model_per_s = Mix(((1 - hit_share, new), (hit_share, known))).most_per_s
        assert 0.8 * measured_per_s < model_per_s < measured_per_s


def test_the_simulation_of_few_hosts_is_the_one_of_the_page(float8: Setting):
    rows = json.loads((RESULTS / "capacity-hosts.json").read_text(encoding="utf-8"))["rows"]
    again = many_hosts(float8, HOSTS[:1])
    assert hosts_table(again) == hosts_table([row for row in rows if row["hosts"] == HOSTS[0]])
    assert {row["hosts"] for row in rows} == set(HOSTS)


def test_results_without_a_known_image_are_refused():
    rows = [{"workload": "direct", "load": 1, "is_open": False, "requests_per_s": 1.0}]
    with pytest.raises(ValueError, match="no closed loop of cached"):
        setting_of({"machine": {}, "rows": rows})


def test_the_model_allows_rates_within_a_fifth_of_real_servers_but_for_one_that_began_without_images(
    printed: dict[str, Table],
):
    check = json.loads((RESULTS / "capacity-check.json").read_text(encoding="utf-8"))
    (head, *rows) = printed["check"]
    assert {row["servers"] for row in check["rows"]} == {1, 2, 4}
    for measured, shown in zip(check["rows"], rows, strict=True):
        name = f"{measured['servers']} servers, {measured['workload']}, {measured['route']}"
        began_alone = measured["servers"] == 1 and measured["workload"] != "direct"
        allowed = float(shown[head.index("rate by the model")].split(" ")[0])
        rate_per_s = measured["num_requests"] / measured["window_s"]
        assert (0.7 if began_alone else 0.79) * rate_per_s < allowed < 1.2 * rate_per_s, name
        assert int(shown[head.index("model")].rstrip("%")) == pytest.approx(100 * measured["hit_share"], abs=4), (
            name
        )


def test_the_page_shows_the_tables_that_the_command_prints(printed: dict[str, Table]):
    page = (CHECKOUT / "docs" / "capacity.md").read_text(encoding="utf-8")
    for name, table in printed.items():
        assert as_markdown(table) in page, f"python -m bench.capacity table: {name}"
