"""Scores answers to questions about pictures: ChartQA, TextVQA and DocVQA, in the layouts that their authors
publish.

`open_questions` reads a split of one of them, from the authors' JSON files or from the Parquet files of data sets
on the hub, which contain the pictures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel_grpc.evaluation.metrics import normalised_levenshtein_similarity, relaxed_accuracy, vqa_accuracy
from kestrel_grpc.evaluation.suitability import question_warnings
from kestrel_grpc.evaluation.tasks import Answer, Call, Case, Report, Score, SetUnusable, find_file, sample

QUESTION = "{question}"
"""The text that stands for the question in a prompt."""
_SHORT = f"{QUESTION}\nAnswer with a single word, number or short phrase."
_VQA_ANSWERS = 10


@dataclass(frozen=True, slots=True)
class Question:
    """Holds a question about a picture, and its right answers. `group` is a part of the set with a score of its
    own."""

    name: str
    picture: str
    image: Path | bytes
    text: str
    truths: tuple[str, ...]
    group: str = ""


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Defines how a published set is read and scored."""

    metric_name: str
    metric: Callable[[str, Sequence[str]], float]
    prompt: str
    split: str
    """The split that is scored by default."""
    read: Callable[[Path, str, Path | None], tuple[Path, list[Question]]]
    """Reads the questions of a split in a folder, and returns them with their source.

    The third argument is another folder of pictures.
    """


class QuestionTask:
    """Holds the questions of one split of a set."""

    def __init__(
        self, kind: QuestionSet, source: Path, split: str, questions: Sequence[Question], prompt: str | None
    ) -> None:
        self.split = split
        self._kind = kind
        self._source = source
        self._questions = questions
        self._prompt = kind.prompt if prompt is None else prompt

    @property
    def source(self) -> str:
        """The file of the questions, or the folder of its files."""
        return str(self._source)

    @property
    def asks(self) -> str:
        """The prompt."""
        return f"Each question is asked with the prompt {self._prompt!r}."

    def calls(self) -> list[Call]:
        """Returns a query for each question."""
        return [
            Call("query", question.image, self._prompt.replace(QUESTION, question.text))
            for question in self._questions
        ]

    def report(self, answers: Sequence[Answer]) -> Report:
        """Returns the mean of the metric, over all questions and over those of each group. A failed call scores
        0."""
        cases: list[Case] = []
        for question, answer in zip(self._questions, answers, strict=True):
            score = 0.0 if answer.error else self._kind.metric(answer.text.strip(), question.truths)
            cases.append(
                Case(
                    question.name,
                    question.picture,
                    question.image,
                    question.text,
                    " | ".join(dict.fromkeys(question.truths)),
                    answer.text.strip(),
                    score,
                    answer.error,
                )
            )
        groups = dict.fromkeys(question.group for question in self._questions if question.group)
        scores = [self._score(self._kind.metric_name, cases)]
        for group in groups if len(groups) > 1 else ():
            of_group = [
                case for case, question in zip(cases, self._questions, strict=True) if question.group == group
            ]
            scores.append(self._score(f"{self._kind.metric_name}, {group}", of_group))
        truths = [question.truths for question in self._questions]
        found = question_warnings(self._kind.metric_name, answers, truths, [case.score for case in cases])
        return Report(scores, cases, warnings=tuple(found))

    @staticmethod
    def _score(name: str, cases: Sequence[Case]) -> Score:
        return Score.mean(name, [case.score for case in cases], [case.picture for case in cases])


def open_questions(
    kind: QuestionSet,
    folder: Path,
    *,
    split: str | None = None,
    pictures: Path | None = None,
    limit: int | None = None,
    prompt: str | None = None,
) -> QuestionTask:
    """Reads a split of a set, or a sample of `limit` questions.

    Raises `SetUnusable`, `OSError`, and `ModuleNotFoundError` for Parquet files without pyarrow.
    """
    split = kind.split if split is None else split
    parquet = sorted((*folder.glob(f"{split}-*.parquet"), *folder.glob(f"data/{split}-*.parquet")))
    if parquet:
        source, questions = parquet[0].parent, _read_parquet(kind, parquet)
    else:
        source, questions = kind.read(folder, split, pictures)
    if not questions:
        raise SetUnusable(f"{source}: has no questions")
    unanswered = next((question for question in questions if not question.truths), None)
    if unanswered is not None:
        raise SetUnusable(
            f"{source}: question {unanswered.name} has no answer; the split may be one without answers"
        )
    if kind is TEXTVQA:
        few = next((question for question in questions if len(question.truths) != _VQA_ANSWERS), None)
        if few is not None:
            raise SetUnusable(f"{source}: question {few.name} has {len(few.truths)} answers, not {_VQA_ANSWERS}")
    return QuestionTask(kind, source, split, sample(questions, limit), prompt)


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file. Raises `SetUnusable` or `OSError`."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise SetUnusable(f"{path}: is not a JSON file") from error


def _read_chartqa(folder: Path, split: str, pictures: Path | None) -> tuple[Path, list[Question]]:
    """Reads `<split>/<split>_human.json`, `<split>/<split>_augmented.json` and `<split>/png/`.

    `folder` is the folder of the set, of its splits, or of the split itself.
    """
    human = find_file(
        folder,
        "questions of ChartQA",
        f"{split}/{split}_human.json",
        f"ChartQA Dataset/{split}/{split}_human.json",
        f"{split}_human.json",
    )
    folder = human.parent
    questions: list[Question] = []
    for group in ("human", "augmented"):
        path = folder / f"{split}_{group}.json"
        for number, entry in enumerate(_entries(path, read_json(path)), 1):
            name, text, label = _fields(path, number, entry, "imgname", "query", "label")
            image = (pictures or folder / "png") / name
            questions.append(Question(f"{group} {number}", name, image, text, (str(label),), group))
    return folder, questions


def _read_textvqa(folder: Path, split: str, pictures: Path | None) -> tuple[Path, list[Question]]:
    """Reads `TextVQA_<version>_<split>.json`, and `train_images/`, which has the pictures of val as well."""
    path = find_file(folder, "questions of TextVQA", f"TextVQA_*_{split}.json", f"*/TextVQA_*_{split}.json")
    pictures = pictures or folder / ("test_images" if split == "test" else "train_images")
    questions: list[Question] = []
    for number, entry in enumerate(_entries(path, read_json(path), "data"), 1):
        name, text, image_id = _fields(path, number, entry, "question_id", "question", "image_id")
        truths = tuple(map(str, entry.get("answers", ())))
        questions.append(Question(str(name), image_id, pictures / f"{image_id}.jpg", text, truths))
    return path, questions


def _read_docvqa(folder: Path, split: str, pictures: Path | None) -> tuple[Path, list[Question]]:
    """Reads `<split>_v1.0*.json`, and the pictures in `documents/` next to it or in `spdocvqa_images/`."""
    path = find_file(
        folder, "questions of DocVQA", f"{split}_v1.0*.json", f"{split}/{split}_v1.0*.json", f"*/{split}_v1.0*.json"
    )
    places = [pictures] if pictures else [path.parent / "documents", folder / "spdocvqa_images"]
    questions: list[Question] = []
    for number, entry in enumerate(_entries(path, read_json(path), "data"), 1):
        name, text, image = _fields(path, number, entry, "questionId", "question", "image")
        file = Path(image).name
        place = next((place for place in places if (place / file).exists()), places[0])
        questions.append(Question(str(name), file, place / file, text, tuple(map(str, entry.get("answers", ())))))
    return path, questions


def _entries(path: Path, content: Any, key: str | None = None) -> list[dict[str, Any]]:
    entries = content.get(key) if key is not None and isinstance(content, dict) else content
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SetUnusable(f"{path}: is not a list of questions" + (f" under {key!r}" if key else ""))
    return entries


def _fields(path: Path, number: int, entry: Mapping[str, Any], *names: str) -> list[Any]:
    missing = [name for name in names if name not in entry]
    if missing:
        raise SetUnusable(f"{path}: entry {number} has no {' and no '.join(missing)}")
    return [entry[name] for name in names]


def _read_parquet(kind: QuestionSet, paths: Sequence[Path]) -> list[Question]:
    """Returns the questions of Parquet files, which contain their pictures."""
    from pyarrow import parquet

    questions: list[Question] = []
    pictures: dict[str, bytes] = {}  # every row about a picture has the picture, which is kept once
    for path in paths:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    questions.append(_question_of_row(kind, path, len(questions) + 1, row, pictures))
    return questions


def _question_of_row(
    kind: QuestionSet, path: Path, number: int, row: Mapping[str, Any], pictures: dict[str, bytes]
) -> Question:
    """Returns the question of a row: `image` with `bytes`; `question` or `query`; and `answers`, `answer` or
    `label`.

    The answers are one or a list.
    """
    text = next((row[name] for name in ("question", "query") if row.get(name) is not None), None)
    image = row.get("image")
    if text is None or not isinstance(image, dict) or not image.get("bytes"):
        raise SetUnusable(f"{path}: row {number} has no question, or no picture with bytes")
    truths = next((row[name] for name in ("answers", "answer", "label") if row.get(name) is not None), ())
    truths = (truths,) if isinstance(truths, str) else tuple(map(str, truths))
    name = next(
        (str(row[name]) for name in ("question_id", "questionId") if row.get(name) is not None), str(number)
    )
    group = next(_groups(row), "") if kind is CHARTQA else ""
    picture = hashlib.sha256(image["bytes"]).hexdigest()[:16]
    return Question(name, picture, pictures.setdefault(picture, image["bytes"]), text, truths, group)


def _groups(row: Mapping[str, Any]) -> Iterator[str]:
    """Returns the origin of each question of ChartQA: `human_or_machine` has 0 for people, `type` a name."""
    if row.get("human_or_machine") is not None:
        yield "augmented" if row["human_or_machine"] else "human"
    if isinstance(row.get("type"), str):
        yield "human" if "human" in row["type"] else "augmented"


CHARTQA = QuestionSet(
    "relaxed accuracy",
    lambda answer, truths: max(relaxed_accuracy(answer, truth) for truth in truths),
    _SHORT,
    "test",
    _read_chartqa,
)
TEXTVQA = QuestionSet("VQA accuracy", vqa_accuracy, _SHORT, "val", _read_textvqa)
DOCVQA = QuestionSet("ANLS", normalised_levenshtein_similarity, _SHORT, "val", _read_docvqa)
