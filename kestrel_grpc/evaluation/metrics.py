"""Computes the metrics of the published sets by their published definitions: an answer and its truth in, 0 to 1
out."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_RELAXED_SHARE = 0.05
_MAX_WRONG_SIMILARITY = 0.5
_ANSWERS_FOR_FULL_VQA_SCORE = 3
_ARTICLES = frozenset(("a", "an", "the"))
_NUMBERS = "zero one two three four five six seven eight nine ten"
_DIGITS = {"none": "0"} | {word: str(number) for number, word in enumerate(_NUMBERS.split())}
# Contractions that are another word without their apostrophe are left out: its, were, well, shed.
_CONTRACTED = """
ain't aren't can't couldn't didn't doesn't don't hadn't hasn't haven't isn't mightn't mustn't needn't oughtn't
shan't shouldn't wasn't weren't won't wouldn't could've might've must've should've would've i've they've we've
who've you've i'm they're who're you're he'd it'd they'd who'd you'd he's here's how's let's she's somebody's
someone's that's there's what's where's who's why's it'll that'll they'll what'll who'll you'll ma'am o'clock
y'all
"""
_CONTRACTIONS = {word.replace("'", ""): word for word in _CONTRACTED.split()}


def relaxed_accuracy(answer: str, truth: str) -> float:
    """Returns 1 if the answer is right by the relaxed accuracy of ChartQA, else 0.

    Source: Masry et al., "ChartQA: A Benchmark for Question Answering about Charts with Visual and Logical
    Reasoning", 2022, section 5.1, after Methani et al., "PlotQA", 2020: a numeric answer may differ from the truth
    by 5 % of it; another answer must be equal, here without regard to case and to space around it. A number with a
    percent sign counts as its hundredth. Numbers with separators of thousands are texts.
    """
    given, wanted = _number(answer), _number(truth)
    if given is not None and wanted is not None:
        # The bound itself counts: 95 for 100. A float holds few such shares exactly.
        difference, bound = abs(given - wanted), _RELAXED_SHARE * abs(wanted)
        return float(difference <= bound or math.isclose(difference, bound, rel_tol=1e-9))
    return float(answer.strip().lower() == truth.strip().lower())


def _number(text: str) -> float | None:
    found = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(%?)", text.strip().lower())
    if found is None:
        return None
    return float(found[1]) / (100.0 if found[2] else 1.0)


def normalised_for_vqa(text: str) -> str:
    """Returns a text in the form in which VQA compares it.

    Source: the evaluation page of VQA (visualqa.org/evaluation.html): lower case; no period that is not a decimal
    point; words of numbers as digits; no articles; the apostrophe of a contraction added where it is missing; a
    space in place of all other punctuation but apostrophe and colon, or nothing for a comma between digits.
    """
    text = re.sub(r"(?<=\d),(?=\d)", "", text.lower())
    text = re.sub(r"\.(?!\d)", "", text)
    text = re.sub(r"[^\w\s.':]|_", " ", text)
    words = (_DIGITS.get(word, word) for word in text.split())
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def vqa_accuracy(answer: str, truths: Sequence[str]) -> float:
    """Returns the accuracy of VQA, from 0 to 1, of an answer to a question that several people have answered.

    Source: Antol et al., "VQA: Visual Question Answering", 2015, and visualqa.org/evaluation.html: min(people who
    gave that answer / 3, 1), averaged over all sets of all people but one. TextVQA (Singh et al., "Towards VQA
    Models That Can Read", 2019) uses it too, with ten people.
    """
    given, wanted = normalised_for_vqa(answer), [normalised_for_vqa(truth) for truth in truths]
    num_equal = wanted.count(given)
    shares = (min((num_equal - (truth == given)) / _ANSWERS_FOR_FULL_VQA_SCORE, 1.0) for truth in wanted)
    return sum(shares) / len(wanted)


def normalised_levenshtein_similarity(answer: str, truths: Sequence[str]) -> float:
    """Returns the similarity, from 0 to 1, whose average over all questions is ANLS.

    Source: Biten et al., "Scene Text Visual Question Answering", 2019, section 4.2, used by Mathew et al., "DocVQA:
    A Dataset for VQA on Document Images", 2021: for the nearest truth, 1 - (edit distance / length of the longer
    text), or 0 where that distance is half of the length or more. Case and the number of spaces do not count.
    """
    given = _spaced(answer)
    best = max(_similarity(given, _spaced(truth)) for truth in truths)
    return best if best > _MAX_WRONG_SIMILARITY else 0.0


def _spaced(text: str) -> str:
    return " ".join(text.lower().split())


def _similarity(first: str, second: str) -> float:
    longer = max(len(first), len(second))
    return 1.0 if longer == 0 else 1.0 - edit_distance(first, second) / longer


def edit_distance(first: str, second: str) -> int:
    """Returns Levenshtein's distance: the fewest characters to insert, delete or replace to make one text the
    other."""
    above = list(range(len(second) + 1))
    for row, character in enumerate(first, 1):
        line = [row]
        for column, other in enumerate(second, 1):
            line.append(min(above[column] + 1, line[-1] + 1, above[column - 1] + (character != other)))
        above = line
    return above[-1]


def is_in_box(x: float, y: float, box: tuple[float, float, float, float]) -> bool:
    """Returns True if a point lies in a box (left, top, right, bottom), edges included."""
    left, top, right, bottom = box
    return left <= x <= right and top <= y <= bottom


def is_in_polygons(x: float, y: float, polygons: Sequence[Sequence[tuple[float, float]]]) -> bool:
    """Returns True if a point lies in at least one of the polygons, each by the even-odd rule."""
    return any(_is_in_polygon(x, y, polygon) for polygon in polygons)


def _is_in_polygon(x: float, y: float, polygon: Sequence[tuple[float, float]]) -> bool:
    is_inside = False
    for (x0, y0), (x1, y1) in zip(polygon, [*polygon[1:], polygon[0]], strict=True):
        if (y0 > y) != (y1 > y) and x < x0 + (x1 - x0) * (y - y0) / (y1 - y0):
            is_inside = not is_inside
    return is_inside
