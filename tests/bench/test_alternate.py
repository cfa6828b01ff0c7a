"""The comparison of two trees: its arithmetic, and one run of this checkout against itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.alternate import Comparison
from tests.bench.small import write_endless_nano
from tests.reference_fixtures import CHECKOUT


def test_a_lower_rate_and_a_longer_time_are_both_slower():
    rates = Comparison("direct, 64 at once", "requests/s", (100.0, 100.0, 100.0), (80.0, 81.0, 79.0))
    times = Comparison("direct, 1 at once", "p50 ms", (10.0, 10.0, 10.0), (12.5, 12.6, 12.4))
    assert rates.slowdown == pytest.approx(0.25)
    assert times.slowdown == pytest.approx(0.25)
    assert rates.spread == pytest.approx(0.01)


def test_each_round_is_compared_with_itself():
    # The machine became half as fast in the last round, for both.
    comparison = Comparison("cot, 64 at once", "requests/s", (100.0, 100.0, 50.0), (102.0, 102.0, 51.0))
    assert comparison.ratio == pytest.approx(1.02)
    assert comparison.spread == pytest.approx(0.0)


def test_rounds_of_several_starts_count_together_and_more_of_them_make_the_mean_more_certain():
    first = Comparison("cached, 64 at once", "requests/s", (100.0, 100.0), (98.0, 102.0))
    second = Comparison("cached, 64 at once", "requests/s", (50.0, 50.0), (49.0, 51.0))
    both = first.and_later(second)
    assert both.ratios == pytest.approx((0.98, 1.02, 0.98, 1.02))
    assert both.mean_ratio == pytest.approx((0.98 * 1.02) ** 0.5)
    assert 0 < both.error < first.error


def test_a_tree_is_compared_with_itself(tmp_path: Path):
    model = write_endless_nano(tmp_path / "endless")
    command = (
        sys.executable,
        "-m",
        "bench.alternate",
        "--before",
        str(CHECKOUT),
        "--after",
        str(CHECKOUT),
        "--model",
        str(model),
    )
    short = ("--rows", "direct:1", "--rounds", "1", "--seconds", "0.2", "--warm-up", "0.1", "--most-slower", "100")
    short += ("--starts", "2", "--connections", "3")
    answer = subprocess.run(
        (*command, *short, "--pictures", "1", "--processes", "1", "--json", str(tmp_path / "result.json")),
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    (row,) = result["rows"]
    assert len(row["first"]) == len(row["second"]) == 2
    assert min(row["first"] + row["second"]) > 0
    assert all(start[tree]["calls"]["server"] > 0 for start in result["starts"] for tree in ("before", "after"))
    assert "direct, 1 at once" in answer.stdout
