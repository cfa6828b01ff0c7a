"""What recordings of `kestrel-grpc bench` amount to, as numbers, text, comparison and page."""

import itertools
import json
import math
import random
import re
from array import array
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kestrel_grpc.cli.bench.loops import Sample, Window
from kestrel_grpc.cli.bench.numbers import Objective, numbers
from kestrel_grpc.cli.bench.page import page
from kestrel_grpc.cli.bench.plot import Axis, Series, bar_plot, line_plot
from kestrel_grpc.cli.bench.processes import Recording
from kestrel_grpc.cli.bench.report import comparison, describe_ratio, document, read, text
from kestrel_grpc.cli.commands import run
from tests.reference_fixtures import CHECKOUT

OPTIONS = {"api": "grpc", "address": "localhost:50051", "skill": "query", "slo": "whole answer within 150 ms"}
CONDITIONS = {
    "client": {"processors": "a processor, 2 processors", "system": "Linux", "python": "3.11"},
    "server": {
        "version": "1.2.3",
        "model": "a model",
        "number_format": "bfloat16",
        "devices": ["2 × NVIDIA H200"],
        "settings": {"kv_dtype": "float8", "page_size": "16"},
    },
    "asked": {
        "skill": "query",
        "pictures": "drawn charts, another picture in each request",
        "picture_sizes": {"801 × 557 px": 16},
        "texts": "12 default",
    },
}


def answer(started: float, seconds: float, *pieces: float, error: str = "", message: str = "") -> Sample:
    """An answer of five tokens, whose pieces came so long after its start."""
    moments = array("d", (started + after for after in pieces or (seconds,)))
    return Sample(started, started + seconds, 5, moments, error, 1, 0, 700, message)


def measured(samples: list[Sample], *, is_open: bool = False, duration_s: float = 10.0) -> dict[str, Any]:
    recording = Recording(Window(0.0, duration_s), tuple(samples), 0.25, 1.5)
    load = {"max_concurrency": None if is_open else 4, "request_rate": 4.0 if is_open else "inf"}
    return load | numbers(recording, Objective(total_ms=150.0), is_open=is_open)


def result(scale: float = 1.0, seed: int = 1, count: int = 400) -> dict[str, Any]:
    """A closed loop of one caller whose answers take about 20 ms times `scale`."""
    chance = random.Random(seed)
    lengths = [scale * chance.uniform(0.015, 0.025) for _ in range(count)]
    starts = itertools.accumulate(lengths, initial=0.0)
    samples = [answer(start, length, length / 2, length) for start, length in zip(starts, lengths, strict=False)]
    step = measured(samples, duration_s=sum(lengths))
    return json.loads(json.dumps(document(OPTIONS, "2026-01-01T00:00:00Z", "a model", CONDITIONS, [step])))


def test_the_names_are_those_of_ghz_in_its_units():
    found = measured([answer(1.0, 0.1), answer(2.0, 0.2), answer(3.0, 0.3, error="UNAVAILABLE", message="gone")])
    assert (found["count"], found["total"]) == (3, 10_000_000_000)
    assert (found["fastest"], found["average"], found["slowest"]) == (100_000_000, 150_000_000, 200_000_000)
    assert found["rps"] == pytest.approx(0.3)
    assert found["statusCodeDistribution"] == {"OK": 2, "UNAVAILABLE": 1}
    assert found["errorDistribution"] == {"gone": 1}
    assert [item["percentage"] for item in found["latencyDistribution"]] == [10, 25, 50, 75, 90, 95, 99]
    assert found["latencyDistribution"][2]["latency"] == 150_000_000
    assert [found["histogram"][place]["mark"] for place in (0, -1)] == pytest.approx([0.1, 0.2])
    assert sum(bucket["count"] for bucket in found["histogram"]) == 2
    assert sum(bucket["frequency"] for bucket in found["histogram"]) == pytest.approx(1.0)


def test_the_names_are_those_of_vllm():
    found = measured([answer(1.0, 0.1, 0.02, 0.06, 0.1), answer(9.9, 0.2, 0.04, 0.1)])
    assert (found["completed"], found["failed"], found["duration"]) == (2, 0, 10.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (1400, 10)
    # Half of the second request lies in the window.
    assert found["request_throughput"] == pytest.approx(0.15)
    assert found["output_throughput"] == pytest.approx(0.75)
    assert found["total_token_throughput"] == pytest.approx(0.15 * 705)
    assert found["request_goodput"] == pytest.approx(0.1)
    assert found["mean_ttft_ms"] == pytest.approx(30)
    assert found["median_itl_ms"] == pytest.approx(40)
    assert found["mean_tpot_ms"] == pytest.approx((80 / 4 + 160 / 4) / 2)
    assert found["p99_e2el_ms"] == pytest.approx(199)
    for short in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{name}_{short}_ms" for name in ("mean", "median", "std", "p90", "p95", "p99")} <= found.keys()


def test_every_field_of_a_result_is_in_the_documentation():
    section = (CHECKOUT / "docs" / "bench.md").read_text(encoding="utf-8").partition("## Results as JSON")[2]
    rows = re.findall(r"^\| (`.*?`) \|", section.partition("\n## ")[0], re.MULTILINE)
    named = set(re.findall(r"`([\w…]+)`", "".join(rows)))
    fields = {re.sub(r"_(ttft|tpot|itl|e2el)_ms$", "_…_ms", name) for name in result()}
    assert named == fields


def test_goodput_of_an_open_loop_counts_what_was_sent_in_the_window():
    found = measured([answer(9.9, 0.14), answer(9.95, 0.3)], is_open=True)
    assert found["request_goodput"] == pytest.approx(0.1)


def test_nothing_that_was_answered_is_no_number():
    found = measured([answer(1.0, 0.1, error="UNAVAILABLE")])
    assert (found["completed"], found["fastest"], found["median_ttft_ms"], found["histogram"]) == (0, 0, None, [])
    shown = text(document(OPTIONS, "", "a model", CONDITIONS, [found]))
    assert "1 UNAVAILABLE" in shown
    assert "page" in page(document(OPTIONS, "", "a page", CONDITIONS, [found]))


@pytest.mark.parametrize(
    "bound", ["", "total_ms", "total_ms=", "total_ms=0", "total_ms=-1", "ttft=4", "total_ms=1,x=2"]
)
def test_a_bound_that_is_none_is_refused(bound: str):
    with pytest.raises(ValueError, match="must be one of first_token_ms"):
        Objective.parse(bound)


def test_bounds_are_read_and_told():
    objective = Objective.parse("first_token_ms=100,per_token_ms=2.5")
    assert str(objective) == "first token within 100 ms, each further token within 2.5 ms"
    assert objective.is_met(answer(0.0, 0.109, 0.1, 0.109))
    assert not objective.is_met(answer(0.0, 0.115, 0.1, 0.115))
    assert not objective.is_met(answer(0.0, 0.106, 0.101, 0.106))


def test_a_ramp_says_at_which_step_what_failed():
    failed = measured([answer(1.0, 0.1), answer(2.0, 0.1, error="UNAVAILABLE", message="gone")])
    steps = [{**result(), "max_concurrency": 1}, {**failed, "max_concurrency": 2}]
    shown = text(document({**OPTIONS, "ramp": [1, 2]}, "", "a model", CONDITIONS, steps))
    assert re.search(r"^1 at once .* 0$", shown, re.MULTILINE)
    assert re.search(r"^2 at once .* 1$", shown, re.MULTILINE)
    assert "2 at once\n2 requests in 10 s: 1 OK, 1 UNAVAILABLE\n  1 × gone" in shown


def test_two_runs_of_the_same_are_within_noise_and_a_slower_one_is_worse():
    same = comparison(result(seed=1), result(seed=2))
    rows = [line for line in same.splitlines() if line.startswith(("requests/s", "whole answer median"))]
    assert len(rows) == 2
    assert all(row.endswith("within noise") for row in rows)
    slower = comparison(result(), result(scale=1.5))
    rows = [line for line in slower.splitlines() if line.startswith(("requests/s", "whole answer median"))]
    assert all(row.endswith("worse") for row in rows)
    faster = comparison(result(scale=1.5), result())
    assert re.search(r"^requests/s .* 1\.\d+ .*better$", faster, re.MULTILINE)


def test_a_comparison_says_what_differs_and_what_it_does_not_know():
    other = result(count=10)
    other["options"] |= {"api": "rest", "text": ["What?"]}
    other["model_id"] = "another"
    told = comparison(result(), other)
    assert "api: grpc in A, rest in B" in told
    assert "text: the default in A, ['What?'] in B" in told
    assert "model: a model in A, another in B" in told
    assert "noise unknown" in told
    other["max_concurrency"] = 9
    assert "no load is in both" in comparison(result(), other)


def test_a_report_says_the_server_the_requests_and_the_machine():
    step = measured([answer(1.0, 0.1), answer(2.0, 0.2)]) | {"total_cached_tokens": 350}
    found = document(OPTIONS, "", "a model", CONDITIONS, [step])
    for shown in (text(found), page(found)):
        assert "1.2.3, a model in bfloat16 on 2 × NVIDIA H200; kv_dtype float8" in shown
        assert (
            "query; pictures: drawn charts, another picture in each request (801 × 557 px); questions: 12 default"
            in shown
        )
        assert "on average 700 tokens in, 25% of them cached, and 5.0 out" in shown
        assert "a processor, 2 processors; Linux" in shown
    assert "<td>page_size</td><td>16</td>" in page(found)
    unknown = document(OPTIONS, "", "a model", {**CONDITIONS, "server": None}, [step])
    assert "server: reports its device and options on its admin port alone" in text(unknown)


def test_a_comparison_names_other_devices_options_and_requests():
    first, second, third = result(), result(seed=2), result(seed=3)
    second["server"] = {
        **second["server"],
        "devices": ["cpu"],
        "settings": {"kv_dtype": "float8", "page_size": "32"},
    }
    second["asked"] = {**second["asked"], "texts": "3 given"}
    found = comparison(first, second)
    assert "server: devices: 2 × NVIDIA H200 in A, cpu in B\n" in found
    assert "server: page_size: 16 in A, 32 in B\n" in found
    assert "asked: texts: 12 default in A, 3 given in B\n" in found
    assert "kv_dtype" not in found
    del third["server"]
    assert "server: not known in B\n" in comparison(first, third)
    assert "What was measured differs" not in comparison(first, result(seed=4))


def test_a_comparison_begins_with_a_sentence_about_which_is_better():
    same, slower, few = result(seed=2), result(scale=1.5), result(count=10)
    faster = comparison(slower, result()).splitlines()[0]
    assert re.fullmatch(
        r"4 at once: B is better: B has [45]\d\.\d% more requests in time/s, which is beyond the noise of \d.\d%\.",
        faster,
    )
    assert comparison(result(), slower).startswith("4 at once: A is better: B has 3")
    assert comparison(result(), same).startswith("4 at once: no difference beyond the noise: B has ")
    assert "but a run was too short to know the noise." in comparison(result(), few)


def test_the_sentence_is_about_what_was_asked_for_and_names_what_speaks_against_it():
    first, second = result(), result(scale=1.5)
    for step in (first, second):
        step |= {"max_concurrency": None, "request_rate": 4.0}
        step["request_goodput"] = None
    assert re.match(
        r"4 sent/s: A is better: B has a \d\d\.\d% longer whole answer median", comparison(first, second)
    )
    second |= {"request_throughput": 2 * first["request_throughput"], "failed": 3, "max_concurrency": 4}
    said = comparison({**first, "max_concurrency": 4}, second).splitlines()[0]
    assert said.startswith("4 at once: B is better: B has 100.0% more requests/s")
    assert "; but B is worse in " in said
    assert said.endswith("requests failed: 3 of B.")


def test_a_run_of_few_requests_knows_its_noise_from_four_parts():
    assert result(count=30)["uncertainty"]["request_throughput"] > 0.0
    assert result(count=15)["uncertainty"]["request_throughput"] is None


def test_answers_without_tokens_to_measure_are_named():
    short = measured([answer(1.0, 0.1), answer(2.0, 0.2)])
    assert "tokens on average" not in text(document(OPTIONS, "", "a model", CONDITIONS, [short]))
    short["total_output_tokens"] = 5
    shown = text(document(OPTIONS, "", "a model", CONDITIONS, [short]))
    assert "4 at once: answers have 2.5 tokens on average, so tokens/s and the time per token mean little" in shown


def test_the_description_of_a_ratio_depends_on_its_direction():
    assert describe_ratio(1.02, 0.03, more_is_better=True) == "within noise"
    assert describe_ratio(1 / 1.02, 0.03, more_is_better=False) == "within noise"
    assert describe_ratio(1.1, 0.03, more_is_better=False) == "worse"
    assert describe_ratio(0.9, 0.03, more_is_better=False) == "better"


def test_the_command_compares_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(result()))
    second.write_text(json.dumps(result(seed=2)))
    assert run(["bench", "compare", str(first), str(second)]) == 0
    assert "within noise" in capsys.readouterr().out
    second.write_text('{"count": 3}')
    assert run(["bench", "compare", str(first), str(second)]) == 2
    assert "is no result of" in capsys.readouterr().err
    assert run(["bench", "compare", str(first), str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert read(first) == result()


def test_the_page_loads_nothing_and_shows_plots():
    steps = [{**result(scale=scale), "max_concurrency": load} for load, scale in ((1, 1.0), (2, 1.6), (4, 3.0))]
    ramp = {name: steps[0][name] for name in ("date", "version", "model_id", "options")}
    ramp |= {"model_id": "<b>a model</b>", "steps": steps}
    written = page(ramp)
    assert "<b>" not in written
    assert written.count("<svg ") > 8
    assert not re.search(r"<(script|link|img|iframe|object|embed)|@import|url\(|src=|href=", written)
    assert set(re.findall(r"https?://[^\"<\s]+", written)) == {"http://www.w3.org/2000/svg"}
    for svg in re.findall(r"<svg .*?</svg>", written, re.DOTALL):
        ElementTree.fromstring(svg)


def test_a_plot_of_nothing_is_empty_and_values_without_a_logarithm_are_left_out():
    assert line_plot("nothing", Axis("x"), Axis("y"), []) == ""
    assert bar_plot("nothing", Axis("x"), Axis("y"), []) == ""
    assert line_plot("zero", Axis("x"), Axis("y", 10), [Series("a", ((1.0, 0.0), (2.0, math.nan)))]) == ""
    drawn = line_plot("some", Axis("x", 2), Axis("y", 10), [Series("a", ((0.0, 1.0), (2.0, 30.0), (4.0, 5.0)))])
    assert drawn.count("<circle") == 2


@pytest.mark.parametrize("values", [(1.0,), (0.001, 0.002, 0.0015), (5.0, 5.0), (3.0, 70000.0, 12.0)])
@pytest.mark.parametrize("base", [None, 2, 10])
def test_every_point_is_inside_its_plot(values: tuple[float, ...], base: int | None):
    points = tuple((index + 1.0, value) for index, value in enumerate(values))
    drawn = line_plot("points", Axis("x", base), Axis("y", base), [Series("a", points)])
    places = re.findall(r'<circle cx="([\d.-]+)" cy="([\d.-]+)"', drawn)
    assert len(places) == len(values)
    assert all(52 <= float(x) <= 342 and 26 <= float(y) <= 212 for x, y in places)
