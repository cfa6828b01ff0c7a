"""The command `kestrel-grpc evaluate`, asked of a true server with the built-in model."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kestrel_grpc.__main__ import main
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.process.machine import processors
from kestrel_grpc.server import Server
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.engine import LocalEngine
from tests.evaluation import sets
from tests.evaluation.test_detection import by_hand
from tests.reference_fixtures import CHECKOUT

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address() -> AsyncIterator[str]:
    config = ServerConfig(port=0, engine=EngineConfig(device="cpu", max_batch_size=8))
    engine = await asyncio.to_thread(LocalEngine.start, config.engine_config())
    async with Server(engine, config) as server:
        yield f"127.0.0.1:{server.port}"


async def evaluate(address: str, *words: str | Path) -> int:
    return await asyncio.to_thread(main, ["evaluate", *map(str, words), "--address", address])


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


async def test_chartqa_from_the_files_to_scores_answers_and_page(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = sets.chartqa(tmp_path / "set")
    page, answers = tmp_path / "page.html", tmp_path / "answers.json"
    assert await evaluate(address, "chartqa", folder, "--html", page, "--json", answers) == 0
    lines = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines() if "accuracy" in line]
    assert lines == [
        ["relaxed accuracy", "0.667", "0.500 to 1.000", "3"],
        ["relaxed accuracy, human", "1.000", "1.000 to 1.000", "2"],
        ["relaxed accuracy, augmented", "0.000", "–", "1"],
    ]
    written = read(answers)
    assert [answer["answered"] for answer in written["answers"]] == ["red", "green", "blue"]
    assert written["scores"]["relaxed accuracy"] == {"value": 2 / 3, "interval_95": [0.5, 1.0], "count": 3}
    assert (written["failed_calls"], written["model"]) == (0, "moondream-nano")
    text = page.read_text(encoding="utf-8")
    assert text.count("<article>") == 1  # what is right is not among the worst
    assert "pink &lt;b&gt;&amp;" in text
    assert set(re.findall(r'(?:src|href)="(.{5})', text)) == {"data:"}
    assert "http:" not in text
    assert "<script" not in text


async def test_streamed_answers_score_as_whole_ones(address: str, tmp_path: Path):
    folder = sets.chartqa(tmp_path / "set")
    whole, streamed = tmp_path / "whole.json", tmp_path / "streamed.json"
    assert await evaluate(address, "chartqa", folder, "--json", whole) == 0
    assert await evaluate(address, "chartqa", folder, "--json", streamed, "--stream") == 0
    one, other = read(whole), read(streamed)
    assert (one["answers"], one["scores"]) == (other["answers"], other["scores"])


async def test_a_report_says_the_server_the_machine_and_the_load(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = sets.chartqa(tmp_path / "set")
    page, answers = tmp_path / "page.html", tmp_path / "answers.json"
    words = ("--in-flight", "2", "--html", page, "--json", answers)
    assert await evaluate(address, "chartqa", folder, *words) == 0
    shown = capsys.readouterr().out
    written = read(answers)
    assert f"server: {written['server']}\n" in shown
    assert f"{written['model']} in float32 on {processors()}; max_batch_size 8" in written["server"]
    assert written["calls"] == "3, 2 at a time"
    assert written["picture_sizes"] == "480 × 360 px"
    assert re.fullmatch(r"\d+ in on average, \d+% of them cached, and 2.0 out", written["tokens"])
    assert written["settings"]["prefix_cache"] == "on"
    assert written["sent_from"].startswith(processors())
    text = page.read_text(encoding="utf-8")
    assert all(part in text for part in ("<td>picture sizes</td>", "<td>max_prefill_tokens</td>", processors()))
    digest = written["asked_sha256"]
    assert await evaluate(address, "chartqa", folder, "--prompt", "{question}", "--json", answers) == 0
    assert read(answers)["asked_sha256"] != digest


async def test_answers_that_are_all_the_same_are_named(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = sets.chartqa(tmp_path / "set")
    page, answers = tmp_path / "page.html", tmp_path / "answers.json"
    for part in ("human", "augmented"):
        entries = read(folder / "test" / f"test_{part}.json")
        sets.write_json(
            folder / "test" / f"test_{part}.json", [e | {"query": "Is there a heart?"} for e in entries]
        )
    assert await evaluate(address, "chartqa", folder, "--html", page, "--json", answers) == 0
    shown = capsys.readouterr().err
    found = read(answers)["warnings"]
    assert [line.removeprefix("kestrel-grpc: warning: ") for line in shown.splitlines()] == found
    assert any(warning.startswith("3 of 3 answers are the same, ") for warning in found)
    assert "3 of 3 answers are the same" in page.read_text(encoding="utf-8")
    assert await evaluate(address, "chartqa", sets.chartqa(tmp_path / "other"), "--json", answers) == 0
    (only,) = read(answers)["warnings"]
    assert "knows drawn shapes and printed text alone" in only


async def test_a_failed_call_is_counted_and_shown(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = sets.chartqa(tmp_path / "set")
    (folder / "test" / "png" / "two.png").write_bytes(b"no picture")
    page, answers = tmp_path / "page.html", tmp_path / "answers.json"
    assert await evaluate(address, "chartqa", folder, "--html", page, "--json", answers) == 1
    shown = capsys.readouterr()
    assert "1 of 3 calls failed and count as wrong; the first: " in shown.err
    assert re.search(r"^relaxed accuracy +0\.333 .* 3$", shown.out, re.MULTILINE)
    written = read(answers)
    assert written["failed_calls"] == 1
    assert [answer["error"] is None for answer in written["answers"]] == [True, False, True]
    text = page.read_text(encoding="utf-8")
    assert "<h2>Failed calls</h2>" in text
    assert "The picture cannot be read." in text


@pytest.mark.parametrize(
    ("task", "write", "expected"),
    [
        # Seven of ten people say red: three others do not matter.
        ("textvqa", sets.textvqa, {"VQA accuracy": 1.0}),
        # One letter of five is another.
        ("docvqa", sets.docvqa, {"ANLS": 0.8}),
    ],
)
async def test_questions_are_scored_by_the_metric_of_their_set(
    address: str, tmp_path: Path, task: str, write: Callable[[Path], Path], expected: dict[str, float]
):
    answers = tmp_path / "answers.json"
    assert await evaluate(address, task, write(tmp_path / "set"), "--json", answers) == 0
    scores = {name: score["value"] for name, score in read(answers)["scores"].items()}
    assert scores == pytest.approx(expected)


async def test_points_are_drawn_into_the_worst_cases(address: str, tmp_path: Path):
    folder = sets.refcoco(tmp_path / "refcoco")
    page, answers = tmp_path / "page.html", tmp_path / "answers.json"
    assert await evaluate(address, "refcoco", folder, "--html", page, "--json", answers) == 0
    scores = {name: score["value"] for name, score in read(answers)["scores"].items()}
    # The outline of the third object is, on purpose, not where its box is.
    assert scores == {"point in outline": 2 / 3, "point in box": 1.0}
    text = page.read_text(encoding="utf-8")
    assert text.count("<img ") == 1
    assert "green square" in text


async def test_scores_of_coco_are_those_of_pycocotools(address: str, tmp_path: Path):
    folder = sets.coco(tmp_path / "coco")
    answers = tmp_path / "answers.json"
    assert await evaluate(address, "coco", folder, "--json", answers) == 0
    written = read(answers)
    stats = by_hand(folder / "annotations" / "instances_val2017.json", written["detections"], tmp_path)
    assert [written["scores"][name]["value"] for name in ("AP", "AP50", "AP75", "AR100")] == [
        stats[place] for place in (0, 1, 2, 8)
    ]
    assert written["scores"]["AP50"]["value"] == 1.0
    assert written["ap_by_category"].keys() == {"circle", "square"}
    assert len(written["detections"]) == 5


@pytest.mark.parametrize(
    ("words", "complaints"),
    [
        (["chartqa", "nowhere", "--limit", "0"], ["nowhere: is no folder", "--limit: must be at least 1"]),
        (["coco", ".", "--prompt", "x", "--stream"], ["--prompt: is an option of", "--stream: is an option of"]),
        (["chartqa", ".", "--prompt", "x"], ["--prompt: has no {question}"]),
        (["chartqa", ".", "--categories", "all"], ["--categories: is an option of coco"]),
        (["chartqa", ".", "--in-flight", "2000"], ["--in-flight: must be at least 1 and at most 1024"]),
        (["chartqa", ".", "--json", "nowhere/x.json"], ["nowhere is no folder"]),
        (["chartqa", "."], [".: has no questions of ChartQA, such as test/test_human.json"]),
    ],
)
async def test_a_mistake_in_the_call_is_told_before_a_server_is_asked(
    words: list[str], complaints: list[str], tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", *words, "--address", "127.0.0.1:1"]) == 2
    told = capsys.readouterr().err
    assert [part for part in complaints if part not in told] == []


async def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "pycocotools", None)  # importing it fails
    assert main(["evaluate", "coco", str(sets.coco(tmp_path)), "--address", "127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == (
        "kestrel-grpc: pycocotools is not installed: pip install 'kestrel-grpc[evaluate]'\n"
    )


async def test_a_server_that_is_not_there_fails_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = sets.chartqa(tmp_path)
    assert await evaluate("127.0.0.1:1", "chartqa", folder, "--json", tmp_path / "answers.json") == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "answers.json").exists()


async def test_the_document_has_each_flag_once(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    flags = set(re.findall(r"^ +(?:-h, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}
    page = (CHECKOUT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE)
    assert len(flags) > 12
    assert sorted(rows) == sorted(flags)
