"""Reports the results of `kestrel-grpc bench`: as a document in JSON, as text, and two of them compared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel_grpc import __version__
from kestrel_grpc.cli.bench.plot import number
from kestrel_grpc.cli.conditions import flat_facts, server_line

TIME_NAMES = {
    "ttft": "first token, ms",
    "tpot": "per token, ms",
    "itl": "between pieces, ms",
    "e2el": "whole answer, ms",
}
"""The descriptions of the times with vLLM's short names."""
_COLUMNS = ("mean", "median", "p90", "p95", "p99")
_BUSY = 0.8
_FEW_TOKENS = 4.0
"""Answers with fewer tokens on average have next to nothing after the first piece that could be measured."""
_UNKNOWN = "–"
# The compared numbers; True if more is better.
_COMPARED: tuple[tuple[str, str, bool], ...] = (
    ("request_throughput", "requests/s", True),
    ("output_throughput", "tokens/s", True),
    ("request_goodput", "requests in time/s", True),
    *(
        (f"{rank}_{short}_ms", f"{name.removesuffix(', ms')} {rank}, ms", False)
        for short, name in TIME_NAMES.items()
        for rank in ("median", "p99")
    ),
)
_CIRCUMSTANCES = (("model", "model_id"), ("version", "version"), ("end", "endReason"))
Table = list[list[str]]


class Unreadable(Exception):
    """A file is not a result; the text says why."""


def document(
    options: Mapping[str, Any],
    date: str,
    model: str,
    conditions: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    *,
    is_complete: bool = True,
) -> dict[str, Any]:
    """Returns a document with all results of a run. `conditions` are `client`, `server` and `asked`.

    Without a ramp the numbers of the step stand at the top level, as in ghz and vLLM. An incomplete run was ended
    before or during its last step.
    """
    found: dict[str, Any] = {
        "date": date,
        "endReason": "normal" if is_complete else "cancel",
        "version": __version__,
        "backend": options["api"],
        "model_id": model,
        "options": dict(options),
        **conditions,
    }
    is_ramp = not {"ramp", "rate_ramp"}.isdisjoint(options)
    return {**found, "steps": [dict(step) for step in steps]} if is_ramp else found | dict(steps[0])


def steps_of(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the steps of a run."""
    return result.get("steps") or [result]


def read(file: Path) -> dict[str, Any]:
    """Reads a result from its file. Raises `Unreadable` or OSError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        for step in steps_of(found):
            load_of(step)
            if not {"request_throughput", "uncertainty"} <= step.keys() or "api" not in found["options"]:
                raise KeyError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{file}: is no result of `kestrel-grpc bench --json`") from error
    return found


def load_of(step: Mapping[str, Any]) -> str:
    """Describes the load of a step."""
    if step["max_concurrency"] is not None:
        return f"{step['max_concurrency']} at once"
    return f"{number(step['request_rate'])} sent/s"


def text(result: Mapping[str, Any]) -> str:
    """Returns tables for a terminal."""
    options = result["options"]
    lines = [f"{result['model_id'] or 'a model'} at {options['address']}, {options['api']}: {options['skill']}"]
    steps = steps_of(result)
    ending = ["", *(f"{name}: {fact}" for name, fact in condition_table(result))]
    if len(steps) > 1:
        lines += ["", *_aligned(ramp_table(result))]
        failures = [line for step in steps if step["failed"] for line in (load_of(step), *_statuses(step))]
        return "\n".join((*lines, *failures, *(note for step in steps for note in notes(step)), *ending))
    (step,) = steps
    lines[0] += f", {load_of(step)}"
    lines += ["", *_aligned(rate_table(step)), "", *_aligned(time_table(step)), ""]
    return "\n".join((*lines, *_statuses(step), *notes(step), *ending))


def condition_table(result: Mapping[str, Any]) -> Table:
    """Returns what another person needs to know to compare the numbers: the server, the requests and the machine.

    Results of older versions have none of it.
    """
    rows: Table = []
    if "server" in result:
        server = result["server"]
        unknown = "reports its device and options on its admin port alone"
        rows.append(["server", unknown if server is None else server_line(server)])
    if "asked" in result:
        rows.append(["asked", _requests_line(result["asked"], steps_of(result))])
    if "client" in result:
        rows.append(["load from", f"{result['client']['processors']}; {result['client']['system']}"])
    return rows


def _requests_line(asked: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str:
    sizes = asked["picture_sizes"]
    pictures = asked["pictures"] + (f" ({', '.join(sizes)})" if sizes else "")
    texts = {"query": "questions", "caption": ""}.get(asked["skill"], "objects")
    parts = [asked["skill"], f"pictures: {pictures}", *([f"{texts}: {asked['texts']}"] if texts else [])]
    completed = sum(step["completed"] for step in steps)
    if completed:
        total, out = (sum(step[f"total_{name}_tokens"] for step in steps) for name in ("input", "output"))
        cached = [step["total_cached_tokens"] for step in steps]
        share = f", {sum(cached) / total:.0%} of them cached" if total and None not in cached else ""
        parts.append(f"on average {total / completed:.0f} tokens in{share}, and {out / completed:.1f} out")
    return "; ".join(parts)


def rate_table(step: Mapping[str, Any]) -> Table:
    """Returns the rates of a step."""
    rows = [["requests/s", number(step["request_throughput"])], ["tokens/s", number(step["output_throughput"])]]
    if step["request_goodput"] is not None:
        rows.append(["in time/s", number(step["request_goodput"])])
    return rows


def time_table(step: Mapping[str, Any]) -> Table:
    """Returns the times of a step."""
    head = ["", *(name.replace("median", "p50") for name in _COLUMNS)]
    return [
        head,
        *(
            [name, *(_shown(step[f"{column}_{short}_ms"]) for column in _COLUMNS)]
            for short, name in TIME_NAMES.items()
        ),
    ]


def ramp_table(result: Mapping[str, Any]) -> Table:
    """Returns a row for each step."""
    has_goodput = any(step["request_goodput"] is not None for step in steps_of(result))
    head = ["load", "requests/s", "tokens/s", *(["in time/s"] if has_goodput else [])]
    head += [f"{name.removesuffix(', ms')} p50 / p99, ms" for name in TIME_NAMES.values()]
    rows = [[*head, "failed"]]
    for step in steps_of(result):
        row = [load_of(step), number(step["request_throughput"]), number(step["output_throughput"])]
        row += [_shown(step["request_goodput"])] if has_goodput else []
        row += [f"{_shown(step[f'median_{short}_ms'])} / {_shown(step[f'p99_{short}_ms'])}" for short in TIME_NAMES]
        rows.append([*row, str(step["failed"])])
    return rows


def _shown(value: float | None) -> str:
    return _UNKNOWN if value is None else number(value)


def _statuses(step: Mapping[str, Any]) -> Iterator[str]:
    counts = ", ".join(f"{count:,} {status}" for status, count in step["statusCodeDistribution"].items())
    noun = "request" if step["count"] == 1 else "requests"
    yield f"{step['count']:,} {noun} in {number(step['duration'])} s: {counts or 'none'}"
    for message, count in step["errorDistribution"].items():
        yield f"  {count:,} × {message}"


def notes(step: Mapping[str, Any]) -> Iterator[str]:
    """Yields remarks about the numbers of a step."""
    if step["is_partial"]:
        yield f"{load_of(step)}: ended early, after {number(step['duration'])} s"
    if step["busiest_client"] > _BUSY:
        yield (
            f"{load_of(step)}: a process of load used {step['busiest_client']:.0%} of a core, so the numbers may "
            "be its own; use more --processes"
        )

    if step["completed"] and step["total_output_tokens"] < _FEW_TOKENS * step["completed"]:
        average = step["total_output_tokens"] / step["completed"]
        yield (
            f"{load_of(step)}: answers have {average:.1f} tokens on average, "
            "so tokens/s and the time per token mean little; ask for longer answers with --text"
        )


def _aligned(table: Table) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for first, *rest in table:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *cells)).rstrip())
    return lines


def comparison(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Compares the second result with the first: a sentence, differences in how they were measured, and all
    numbers."""
    by_load = {load_of(step): step for step in steps_of(first)}
    shared = [
        (load_of(step), by_load[load_of(step)], step) for step in steps_of(second) if load_of(step) in by_load
    ]
    differences = [*_differences(first, second)]
    if not shared:
        return "\n".join(("The results cannot be compared: no load is in both.", *differences))
    lines = [*(f"{load}: {conclusion(a, b)}" for load, a, b in shared)]
    if differences:
        lines += ["", "What was measured differs:", *differences]
    for load, a, b in shared:
        lines += ["", load, *_aligned(_comparison_table(_ratios(a, b)))]
    lines += [
        "",
        "Noise is the range of 95% of repetitions, estimated from the parts of a run; it covers nothing",
        "of what differs between runs. Repeat both in turns before you rely on a small difference.",
    ]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Ratio:
    """Compares a number of two results. `noise` is the share by which two equal runs differ; None if unknown."""

    field: str
    name: str
    first: float
    second: float
    noise: float | None
    more_is_better: bool

    @property
    def value(self) -> float:
        return self.second / self.first

    @property
    def verdict(self) -> str:
        return describe_ratio(self.value, self.noise, more_is_better=self.more_is_better)


def _ratios(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[_Ratio]:
    found: list[_Ratio] = []
    for field, name, more_is_better in _COMPARED:
        a, b = first.get(field), second.get(field)
        if a and b:
            shares = [step["uncertainty"].get(field) for step in (first, second)]
            noise = None if None in shares else math.hypot(*shares)
            found.append(_Ratio(field, name, a, b, noise, more_is_better))
    return found


def conclusion(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Returns a sentence: which of two steps with the same load is better, by how much, and whether that is noise.

    It is about the requests in time if both have bounds, else in a closed loop about requests per second, and in an
    open loop, whose rate is given, about the median time of whole answers.
    """
    ratios = {ratio.field: ratio for ratio in _ratios(first, second)}
    is_open = first["max_concurrency"] is None
    fields = ("request_goodput", "median_e2el_ms" if is_open else "request_throughput")
    main = next((ratios[field] for field in fields if field in ratios), None)
    if main is None:
        return "nothing can be compared, since one of both has no answers."
    words = ("more", "fewer") if main.more_is_better else ("longer", "shorter")
    change = f"{abs(main.value - 1.0):.1%} {words[main.value < 1.0]}"
    amount = f"{change} {main.name}" if main.more_is_better else f"a {change} {main.name.removesuffix(', ms')}"
    if main.noise is None:
        said = f"B has {amount}, but a run was too short to know the noise"
    elif main.verdict == "within noise":
        said = f"no difference beyond the noise: B has {amount}, and equal runs differ by up to {main.noise:.1%}"
    else:
        better = "B" if main.verdict == "better" else "A"
        said = f"{better} is better: B has {amount}, which is beyond the noise of {main.noise:.1%}"
    opposite = {"better": "worse", "worse": "better"}.get(main.verdict)
    others = [ratio.name.removesuffix(", ms") for ratio in ratios.values() if ratio.verdict == opposite]
    if others:
        said += f"; but B is {opposite} in {', '.join(others)}"
    failed = [f"{step['failed']:,} of {name}" for name, step in (("A", first), ("B", second)) if step["failed"]]
    return f"{said}; requests failed: {' and '.join(failed)}." if failed else f"{said}."


def _comparison_table(ratios: Sequence[_Ratio]) -> Table:
    """Returns the rows of one load."""
    table = [["", "A", "B", "B / A", "noise", ""]]
    for ratio in ratios:
        noise = _UNKNOWN if ratio.noise is None else f"±{ratio.noise:.1%}"
        numbers = (number(ratio.first), number(ratio.second), f"{ratio.value:.3f}", noise, ratio.verdict)
        table.append([ratio.name, *numbers])
    return table


def describe_ratio(ratio: float, noise: float | None, *, more_is_better: bool) -> str:
    """Describes a ratio, given `noise`: the share by which two equal runs differ."""
    if noise is None:
        return "noise unknown"
    if abs(math.log(ratio)) <= noise:
        return "within noise"
    return "better" if (ratio > 1.0) is more_is_better else "worse"


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    pairs = [(name, first[field], second[field]) for name, field in _CIRCUMSTANCES]
    for part in ("server", "asked", "client"):
        a, b = (flat_facts(result.get(part) or {}) for result in (first, second))
        if a and b:
            pairs += [(f"{part}: {name}", a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b))]
        elif a or b:
            yield f"{part}: not known in {'B' if a else 'A'}"
    names = dict.fromkeys((*first["options"], *second["options"]))
    pairs += [(name, first["options"].get(name), second["options"].get(name)) for name in names]
    for name, a, b in pairs:
        if a != b:
            yield f"{name}: {_said(a)} in A, {_said(b)} in B"


def _said(value: Any) -> str:
    return "the default" if value is None else str(value)
