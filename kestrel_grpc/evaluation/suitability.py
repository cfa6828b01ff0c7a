"""Finds out whether a prompt suits the model and the metric, by the answers.

A score of answers that are empty, all equal or in another form than the metric reads says little about the model.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from kestrel_grpc.evaluation.tasks import Answer

_LEAST = 3
"""The fewest answers that show a pattern."""
_FEW, _NEARLY_ALL = 0.1, 0.9
_LONG_WORDS, _LONG_FACTOR = 4, 3
"""Answers are sentences where they have so many words, and so many times as many as the expected ones."""
_REMEDY = "--prompt sets another prompt"


def question_warnings(
    metric: str, answers: Sequence[Answer], truths: Sequence[Sequence[str]], scores: Sequence[float]
) -> Iterator[str]:
    """Yields warnings about answers in text, their truths and their scores, one of each for every question."""
    given = [item for item in zip(answers, truths, scores, strict=True) if not item[0].error]
    count = len(given)
    if count < _LEAST:
        return
    texts = [_plain(answer.text) for answer, _, _ in given]
    firsts = [_plain(expected[0]) for _, expected, _ in given]
    num_empty = texts.count("")
    if num_empty >= _FEW * count:
        yield f"{num_empty} of {count} answers are empty: the model may not understand the prompt; {_REMEDY}"
    common, num_equal = Counter(texts).most_common(1)[0]
    if common and num_equal >= _NEARLY_ALL * count and firsts.count(common) < _NEARLY_ALL * count:
        yield (
            f"{num_equal} of {count} answers are the same, {common[:60]!r}, and the expected ones are not: the "
            f"model may not understand the prompt; {_REMEDY}"
        )
    num_within = sum(
        score < 1.0 and any(_is_within(_plain(truth), text) for truth in expected)
        for text, (_, expected, score) in zip(texts, given, strict=True)
    )
    num_words, num_wanted = (statistics.median(len(text.split()) for text in kind) for kind in (texts, firsts))
    if num_within >= _FEW * count:
        yield (
            f"{num_within} of {count} answers have the expected one within a longer text, which {metric} does not "
            f"count as right: the prompt should ask for the answer alone; {_REMEDY}"
        )
    elif num_words >= max(_LONG_WORDS, _LONG_FACTOR * num_wanted):
        yield (
            f"answers have {num_words:g} words, the expected ones {num_wanted:g} (medians), and {metric} compares "
            f"whole texts: the prompt should ask for the answer alone; {_REMEDY}"
        )
    num_cut = sum(answer.is_cut for answer, _, _ in given)
    if num_cut >= _FEW * count:
        yield f"{num_cut} of {count} answers were ended by their limit; --max-tokens sets a higher one"


def object_warnings(answers: Sequence[Answer]) -> Iterator[str]:
    """Yields a warning if nothing was found in any picture of the set, each of which has what is asked for."""
    given = [answer for answer in answers if not answer.error]
    if len(given) >= _LEAST and not any(answer.points or answer.boxes for answer in given):
        yield f"none of {len(given)} answers has an object: the model may not know the objects of this set"


def _plain(text: str) -> str:
    """Returns a text in lower case without the marks and spaces around it."""
    return " ".join(text.lower().split()).strip(" .,;:!?'\"")


def _is_within(truth: str, text: str) -> bool:
    """Returns True if the text has the truth between other words."""
    return bool(truth) and text != truth and re.search(rf"(?<!\w){re.escape(truth)}(?!\w)", text) is not None
