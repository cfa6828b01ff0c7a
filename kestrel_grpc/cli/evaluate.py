"""Implements `kestrel-grpc evaluate`: scores the model of a running server on a published set.

`kestrel_grpc/evaluation/` reads the set and scores the answers; this module sends many calls at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel_grpc.cli.common import add_client_arguments, explain, run_with_client, show
from kestrel_grpc.cli.conditions import server_facts, server_line
from kestrel_grpc.process.machine import machine_facts
from kestrel_grpc.process.terminal import print_error
from kestrel_runtime.api.config import BUILT_IN_MODEL

if TYPE_CHECKING:
    from PIL import Image

    from kestrel_client import Client, Job, Outcome, Progress, Usage
    from kestrel_grpc.evaluation.tasks import Answer, Call, Case, Report, Score, Task

_FAILED, _MISUSED = 1, 2
_IN_FLIGHT = 32
_MAX_IN_FLIGHT = 1024
_NUM_WORST = 50
_QUESTIONS = ("chartqa", "textvqa", "docvqa")
_TASKS = (*_QUESTIONS, "refcoco", "coco")


def add_evaluate_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command; it sets `run`, which takes the parsed arguments and returns the exit status."""
    parser = subparsers.add_parser(
        "evaluate",
        help="score the model of a running server on a published set",
        description="Ask a running server about a set in FOLDER, at temperature 0, and print the scores with 95 % "
        "intervals. Nothing is downloaded. Exit 0 if every call was answered, 1 if some failed or the server "
        "cannot be reached, 2 for a mistake in the call or a set that cannot be read.",
        usage="%(prog)s TASK FOLDER [OPTION ...]",
        allow_abbrev=False,
    )
    parser.add_argument("task", metavar="TASK", choices=_TASKS, help=f"one of {', '.join(_TASKS)}")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the set, in the layout of its authors")
    add_client_arguments(parser)
    parser.add_argument("--split", metavar="NAME", help="the part of the set (the one that is usually scored)")
    parser.add_argument(
        "--pictures", metavar="FOLDER", type=Path, help="folder of the pictures (where the layout has it)"
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=int,
        help="ask about a random sample of N questions, expressions or, of coco, pictures; the same in every run",
    )
    parser.add_argument(
        "--categories",
        choices=("all", "present"),
        help="coco: ask each picture for all categories, or for those that are in it (all)",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="the question to send, in which {question} stands for that of the set"
    )
    parser.add_argument(
        "--reasoning", action="store_true", help="let the model reason before it answers a question"
    )
    parser.add_argument("--max-tokens", metavar="N", type=int, help="maximum number of tokens of an answer")
    parser.add_argument("--stream", action="store_true", help="ask questions by the streaming call")
    parser.add_argument("--adapter", metavar="NAME", help="adapter (LoRA) to use, such as name or name@step")
    parser.add_argument("--model", metavar="NAME", help="the model (the one that is served)")
    parser.add_argument(
        "--in-flight",
        metavar="N",
        type=int,
        default=_IN_FLIGHT,
        help="calls at a time (%(default)s)",
    )
    parser.add_argument("--html", metavar="PAGE", type=Path, help="write a page with the worst cases to this file")
    parser.add_argument(
        "--worst",
        metavar="N",
        type=int,
        default=_NUM_WORST,
        help="cases on that page (%(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write scores and all answers to this file")
    parser.set_defaults(run=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int:
    from kestrel_grpc.evaluation.tasks import SetUnusable

    try:
        problems = list(_problems(arguments))
        for problem in problems:
            print_error(problem)
        if problems:
            return _MISUSED
        task = _open(arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("pyarrow", "pycocotools"):
            raise
        print_error(f"{error.name.partition('.')[0]} is not installed: pip install 'kestrel-grpc[evaluate]'")
        return _MISUSED
    except SetUnusable as error:
        print_error(str(error))
        return _MISUSED
    except OSError as error:
        print_error(explain(error))
        return _MISUSED
    return run_with_client(partial(_run, task), arguments)


def _problems(arguments: argparse.Namespace) -> Iterable[str]:
    if not arguments.folder.is_dir():
        yield f"{arguments.folder}: is no folder"
    if arguments.categories is not None and arguments.task != "coco":
        yield "--categories: is an option of coco"
    if arguments.task not in _QUESTIONS:
        for name in ("prompt", "reasoning", "stream"):
            if getattr(arguments, name):
                yield f"--{name}: is an option of {', '.join(_QUESTIONS)}"
    if arguments.prompt is not None and "{question}" not in arguments.prompt:
        yield "--prompt: has no {question}"
    for name, least, most in (("limit", 1, None), ("in_flight", 1, _MAX_IN_FLIGHT), ("worst", 0, None)):
        number: int | None = getattr(arguments, name)
        if number is not None and (number < least or (most is not None and number > most)):
            bounds = f"at least {least}" + (f" and at most {most}" if most is not None else "")
            yield f"--{name.replace('_', '-')}: must be {bounds}"
    for name in ("html", "json"):
        path: Path | None = getattr(arguments, name)
        if path is not None and not path.absolute().parent.is_dir():
            yield f"--{name}: {path.absolute().parent} is no folder"


def _open(arguments: argparse.Namespace) -> Task:
    """Reads the set. Raises `SetUnusable`, `OSError` or `ModuleNotFoundError`."""
    from kestrel_grpc.evaluation import detection, pointing, questions

    common: dict[str, Any] = {name: getattr(arguments, name) for name in ("split", "pictures", "limit")}
    if arguments.task == "coco":
        return detection.open_detection(arguments.folder, **common, categories=arguments.categories or "all")
    if arguments.task == "refcoco":
        return pointing.open_pointing(arguments.folder, **common)
    kinds = {"chartqa": questions.CHARTQA, "textvqa": questions.TEXTVQA, "docvqa": questions.DOCVQA}
    return questions.open_questions(kinds[arguments.task], arguments.folder, **common, prompt=arguments.prompt)


def _run(task: Task, client: Client, arguments: argparse.Namespace) -> int:
    """Asks and reports; returns the exit status. Raises errors of the client and `OSError`."""
    server = server_facts(client, arguments.model or "")  # fails once, here, if there is no server
    model = arguments.model or ("unknown" if server is None else server["model"])
    known = _warnings_of(model)
    for warning in known:
        print_error(f"warning: {warning}")
    calls = task.calls()
    begun = time.monotonic()
    answers, usage = _ask(client, calls, arguments)
    duration_s = time.monotonic() - begun
    report = task.report(answers)
    facts = {
        "set": task.source,
        "split": task.split,
        "sample": "all" if arguments.limit is None else f"at most {arguments.limit}",
        "asked": task.asks,
        "calls": f"{len(answers)}, {arguments.in_flight} at a time",
        "asked_sha256": _digest(calls),
        "picture_sizes": _sizes(calls),
        "tokens": str(usage),
        "took": f"{duration_s:.1f} s, {len(answers) / duration_s:.2f} calls/s",
        "model": model,
        "adapter": arguments.adapter or "none",
        "reasoning": "yes" if arguments.reasoning else "no",
        "server": "unknown" if server is None else server_line(server),
        "address": arguments.address,
        "sent_from": "; ".join((machine_facts()["processors"], machine_facts()["system"])),
    }
    settings: Mapping[str, str] = {} if server is None else server["settings"]
    _print_scores(report.scores)
    _print_rows(report.table)
    for name in ("server", "calls", "picture_sizes", "tokens", "took", "sent_from"):
        show(f"{name.replace('_', ' ')}: {facts[name]}")
    for warning in report.warnings:
        print_error(f"warning: {warning}")
    report = replace(report, warnings=(*known, *report.warnings))
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        print_error(f"{len(errors)} of {len(answers)} calls failed and count as wrong; the first: {errors[0]}")
    if arguments.html is not None:
        from kestrel_client.label_fonts import LabelFonts
        from kestrel_grpc.evaluation.html_report import TEXT_PX, Drawing, html_page

        title = f"{arguments.task}: {facts['model']}"
        rows = {name.replace("_", " "): fact for name, fact in facts.items()}
        drawing = Drawing(_open_picture, LabelFonts(TEXT_PX).line)
        arguments.html.write_text(
            html_page(title, report, rows, settings, arguments.worst, drawing), encoding="utf-8"
        )
    if arguments.json is not None:
        _write_json(arguments.json, arguments.task, {**facts, "settings": settings}, report, len(errors))
    return _FAILED if errors else 0


def _open_picture(file: Path | bytes) -> Image.Image:
    """Returns a copy in RGB, as the model sees it. Raises `OSError` or `ValueError` for a file that is not a
    picture."""
    from kestrel_client.drawing import draw
    from kestrel_client.errors import KestrelClientError

    try:
        return draw(file)  # draws nothing on it
    except KestrelClientError as error:
        raise ValueError(str(error)) from error


def _warnings_of(model: str) -> tuple[str, ...]:
    """Returns what is known about the model before it answers."""
    if model != BUILT_IN_MODEL:
        return ()
    return (
        f"{model}, the built-in model, knows drawn shapes and printed text alone; its scores on photographs and "
        "charts say nothing about Moondream",
    )


def _digest(calls: Sequence[Call]) -> str:
    """Returns the start of the SHA-256 of all texts in their order, which is the same for the same sample."""
    return hashlib.sha256("\0".join(f"{call.skill} {call.text}" for call in calls).encode()).hexdigest()[:16]


def _sizes(calls: Sequence[Call]) -> str:
    """Returns the smallest and the largest width and height of the pictures that can be read."""
    from PIL import Image

    sizes: list[tuple[int, int]] = []
    for image in dict.fromkeys(call.image for call in calls):
        with (
            suppress(OSError, ValueError, Image.DecompressionBombError),
            Image.open(image if isinstance(image, Path) else io.BytesIO(image)) as found,
        ):
            sizes.append(found.size)
    if not sizes:
        return "unknown"
    widths, heights = zip(*sizes, strict=True)
    least, most = f"{min(widths)} × {min(heights)}", f"{max(widths)} × {max(heights)}"
    return f"{least} px" if least == most else f"from {least} to {most} px"


@dataclass(slots=True)
class _Tokens:
    """Adds up the tokens of answers."""

    num_answers: int = 0
    num_in: int = 0
    num_cached: int = 0
    num_out: int = 0

    def add(self, usage: Usage) -> None:
        self.num_answers += 1
        self.num_in += usage.input_token_count
        self.num_cached += usage.cached_token_count
        self.num_out += usage.output_token_count

    def __str__(self) -> str:
        if not self.num_answers:
            return "none"
        share = self.num_cached / max(1, self.num_in)
        means = f"{self.num_in / self.num_answers:.0f} in on average, {share:.0%} of them cached"
        return f"{means}, and {self.num_out / self.num_answers:.1f} out"


def _ask(client: Client, calls: Sequence[Call], arguments: argparse.Namespace) -> tuple[list[Answer], _Tokens]:
    """Returns the answers, in the order of the calls, and the sums of their tokens."""
    options: dict[str, Any] = {"temperature": 0.0}
    options |= {
        name: getattr(arguments, name)
        for name in ("adapter", "model", "max_tokens")
        if getattr(arguments, name) is not None
    }
    jobs = [_job(call, options, arguments) for call in calls]
    on_progress = _show_progress if sys.stderr.isatty() else None
    with closing(client.map(jobs, concurrency=arguments.in_flight, on_progress=on_progress)) as outcomes:
        answers: list[Answer] = []
        tokens = _Tokens()
        for outcome in outcomes:
            answers.append(_answer(outcome))
            if outcome.result is not None:
                tokens.add(outcome.result.usage)
    if on_progress is not None:
        print(file=sys.stderr)
    return answers, tokens


def _job(call: Call, options: dict[str, Any], arguments: argparse.Namespace) -> Job:
    from kestrel_client import Job

    if call.skill == "query":
        options = {"reasoning": arguments.reasoning, "is_streamed": arguments.stream, **options}
    else:
        options = {"max_objects": call.max_objects, **options}
    return Job(call.skill, call.image, call.text, **options)


def _answer(outcome: Outcome) -> Answer:
    from kestrel_client import DetectResult, FinishReason, PointResult, QueryResult
    from kestrel_grpc.evaluation.tasks import Answer

    match outcome.result:
        case None:
            assert outcome.error is not None, "a job has a result or an error"
            return Answer(error=explain(outcome.error))
        case QueryResult(answer=text, finish_reason=reason):
            return Answer(text=text, is_cut=reason is FinishReason.LENGTH)
        case PointResult(points=points):
            return Answer(points=tuple((point.x, point.y) for point in points))
        case DetectResult(objects=objects):
            boxes = tuple((item.box.x_min, item.box.y_min, item.box.x_max, item.box.y_max) for item in objects)
            scores = tuple(item.score for item in objects if item.score is not None)
            return Answer(boxes=boxes, scores=scores if len(scores) == len(boxes) else ())
        case _:
            raise AssertionError("no task asks for such a result")


def _show_progress(progress: Progress) -> None:
    failed = f", {progress.failed_count} failed" if progress.failed_count else ""
    print(f"\r{progress.done_count} of {progress.total_count} calls{failed}", end="", file=sys.stderr, flush=True)


def _print_scores(scores: Iterable[Score]) -> None:
    from kestrel_grpc.evaluation.html_report import score_cells

    _print_rows([("score", "value", "95 % interval", "of"), *map(score_cells, scores)])


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        show("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _write_json(path: Path, task: str, facts: dict[str, Any], report: Report, num_failed: int) -> None:
    content = {
        "task": task,
        **facts,
        "failed_calls": num_failed,
        "warnings": report.warnings,
        "scores": {
            score.name: {"value": score.value, "interval_95": score.interval, "count": score.count}
            for score in report.scores
        },
        "answers": [_case_fields(case) for case in report.cases],
        **report.further,
    }
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _case_fields(case: Case) -> dict[str, Any]:
    names = ("name", "picture", "asked", "expected", "answered", "score", "error")
    return {name: getattr(case, name) for name in names}
