"""Reading the published layouts, and what is said about files that are not in them."""

import json
import pickle
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from kestrel_grpc.evaluation.pointing import open_pointing
from kestrel_grpc.evaluation.questions import CHARTQA, DOCVQA, TEXTVQA, QuestionSet, open_questions
from kestrel_grpc.evaluation.tasks import Answer, SetUnusable, sample
from tests.evaluation import sets


def test_chartqa_is_read_from_the_folder_above_and_from_the_split(tmp_path: Path):
    folder = sets.chartqa(tmp_path / "ChartQA Dataset")
    for given in (tmp_path, folder, folder / "test"):
        calls = open_questions(CHARTQA, given, prompt="{question}").calls()
        assert [call.text for call in calls] == [
            "What color is the circle?",
            "What color is the square?",
            "What color is the square?",
        ]
        assert [call.image for call in calls] == [folder / "test" / "png" / f"{name}.png" for name in sets_order()]


def sets_order() -> tuple[str, ...]:
    return ("one", "two", "one")


def test_scores_of_chartqa_are_told_apart_by_who_asked(tmp_path: Path):
    task = open_questions(CHARTQA, sets.chartqa(tmp_path))
    report = task.report([Answer("red"), Answer("blue"), Answer(error="is gone")])
    assert [(score.name, score.count) for score in report.scores] == [
        ("relaxed accuracy", 3),
        ("relaxed accuracy, human", 2),
        ("relaxed accuracy, augmented", 1),
    ]
    assert [score.value for score in report.scores] == [1 / 3, 0.5, 0.0]
    assert [case.name for case in report.worst(5)] == ["human 2", "augmented 1"]
    assert report.worst(5)[1].error == "is gone"


@pytest.mark.parametrize(
    ("kind", "columns", "answer"),
    [
        (CHARTQA, {"query": "What?", "label": ["red"], "human_or_machine": 0}, "Red"),
        (CHARTQA, {"question": "What?", "answer": "red", "type": "human_test"}, "red"),
        (TEXTVQA, {"question_id": 1, "question": "What?", "answers": ["red"] * 10}, "a red"),
        (DOCVQA, {"questionId": "1", "question": "What?", "answers": ["no", "red"]}, "red"),
    ],
)
def test_parquet_files_hold_questions_and_pictures(
    tmp_path: Path, kind: QuestionSet, columns: dict[str, object], answer: str
):
    image = {"bytes": sets.picture_bytes("one"), "path": None}
    (tmp_path / "data").mkdir()
    table = pyarrow.Table.from_pylist([{**columns, "image": image}])
    parquet.write_table(table, tmp_path / "data" / f"{kind.split}-00000-of-00001.parquet")
    task = open_questions(kind, tmp_path, prompt="{question}")
    (call,) = task.calls()
    assert (call.image, call.text) == (image["bytes"], "What?")
    assert task.report([Answer(answer)]).scores[0].value == 1.0


@pytest.mark.parametrize(
    ("kind", "name", "content", "complaint"),
    [
        (CHARTQA, "test/other.json", [], "has no questions of ChartQA, such as test/test_human.json"),
        (TEXTVQA, "TextVQA_0.5.1_val.json", "x", "is not a list of questions under 'data'"),
        (TEXTVQA, "TextVQA_0.5.1_val.json", {"data": []}, "has no questions"),
        (
            TEXTVQA,
            "TextVQA_0.5.1_val.json",
            {"data": [{"question_id": 1, "question": "?"}]},
            "entry 1 has no image_id",
        ),
        (
            TEXTVQA,
            "TextVQA_0.5.1_val.json",
            {"data": [{"question_id": 1, "question": "?", "image_id": "a", "answers": ["a"]}]},
            "question 1 has 1 answers, not 10",
        ),
        (
            DOCVQA,
            "val_v1.0.json",
            {"data": [{"questionId": 9, "question": "?", "image": "documents/a.png"}]},
            "question 9 has no answer",
        ),
    ],
)
def test_what_is_wrong_with_a_set_is_told(
    tmp_path: Path, kind: QuestionSet, name: str, content: object, complaint: str
):
    sets.write_json(tmp_path / name, content)
    with pytest.raises(SetUnusable, match=complaint):
        open_questions(kind, tmp_path)


def test_a_torn_file_is_told(tmp_path: Path):
    (tmp_path / "val_v1.0.json").write_text(json.dumps({"data": []})[:-3])
    with pytest.raises(SetUnusable, match="is not a JSON file"):
        open_questions(DOCVQA, tmp_path)


def test_a_point_must_lie_in_the_outline_and_misses_count(tmp_path: Path):
    task = open_pointing(sets.refcoco(tmp_path / "refcoco"))
    assert [call.text for call in task.calls()] == ["red circle", "circle", "green square"]
    inside = (120 / 480, 120 / 360)
    # The third object's outline is not where its box is.
    in_box_alone = (110 / 480, 230 / 360)
    report = task.report([Answer(points=(inside,)), Answer(), Answer(points=(in_box_alone,))])
    assert {score.name: score.value for score in report.scores} == {
        "point in outline": 1 / 3,
        "point in box": 2 / 3,
    }


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path):
    class Command:
        def __reduce__(self):
            return (tmp_path.joinpath("made").touch, ())

    folder = sets.refcoco(tmp_path / "refcoco")
    (folder / "refs(unc).p").write_bytes(pickle.dumps([Command()]))
    with pytest.raises(SetUnusable, match="is not a pickle of plain data"):
        open_pointing(folder)
    assert not (tmp_path / "made").exists()


def test_a_sample_is_the_same_every_time_and_keeps_the_order():
    numbers = list(range(1000))
    drawn = sample(numbers, 20)
    assert len(set(drawn)) == 20
    assert drawn == sorted(drawn) == sample(numbers, 20)
    assert drawn != numbers[:20]
    assert sample(numbers, None) == sample(numbers, 5000) == numbers
