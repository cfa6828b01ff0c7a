"""Masks of a step, and the answers that the tokens allowed by them can spell."""

import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import ConstraintFailed
from kestrel_runtime.constraints.compiler import ConstraintCompiler
from kestrel_runtime.constraints.masks import AnswerMatcher, LibraryMasks, MaskRequest, step_masks
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.batch import Batch
from kestrel_runtime.scheduling.sequence import SequenceState
from tests.runtime.constraints.vocabularies import END_ID, TOKENIZER, VOCAB_SIZE, new_compiler, tokens_of
from tests.runtime.sequences import new_sequence

ANSWER_ID = 7
"""Stands for the token that ends a reasoning."""


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return new_compiler()


@pytest.fixture
def maker() -> LibraryMasks:
    return LibraryMasks(VOCAB_SIZE, 2)


def matcher(
    compiler: ConstraintCompiler, constraint: Constraint, opens_answer: int | None = None, max_tokens: int = 1000
) -> AnswerMatcher:
    return AnswerMatcher(compiler.compiled(constraint, END_ID), opens_answer, max_tokens)


def allowed(mask: Any) -> set[int]:
    assert mask.dtype == np.int32
    assert mask.shape == (-(-VOCAB_SIZE // 32),)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def one(maker: LibraryMasks, own: AnswerMatcher, generated: Sequence[Token]) -> Any:
    (mask,) = maker.masks([MaskRequest(own, generated)])
    return mask


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_masks_allow_spells_the_constraint(
    compiler: ConstraintCompiler, maker: LibraryMasks, seed: int
):
    regex, chance = "(ab|[x-z]{2,4}){1,3}-[0-9é]{2}", random.Random(seed)
    own, generated = matcher(compiler, Constraint(regex=regex)), list[Token]()
    while True:
        token_id = chance.choice(sorted(allowed(one(maker, own, generated))))
        if token_id == END_ID:
            break
        generated.append(Token(token_id))
    assert re.fullmatch(regex, TOKENIZER.decode(token.id for token in generated))


def test_masks_of_several_answers_are_those_of_each_alone(compiler: ConstraintCompiler, maker: LibraryMasks):
    cases = [
        (Constraint(choices=("yes", "no")), ""),
        (Constraint(choices=("yes", "no")), "ye"),
        (Constraint(regex="[0-9]+"), "4"),
        (Constraint(json_schema='{"type": "object"}'), "{"),
    ]
    alone = [one(maker, matcher(compiler, constraint), tokens_of(text)) for constraint, text in cases]
    requests = [MaskRequest(matcher(compiler, constraint), tokens_of(text)) for constraint, text in cases]
    together = maker.masks(requests)
    assert [allowed(mask) for mask in together] == [allowed(mask) for mask in alone]
    assert len({frozenset(allowed(mask)) for mask in alone}) == len(cases)


def test_the_end_token_may_come_where_the_answer_is_complete(compiler: ConstraintCompiler, maker: LibraryMasks):
    ends = [
        END_ID in allowed(one(maker, matcher(compiler, Constraint(choices=("no", "not"))), tokens_of(text)))
        for text in ("", "n", "no", "not")
    ]
    assert ends == [False, False, True, True]


def test_neither_control_tokens_nor_unknown_ids_may_come(compiler: ConstraintCompiler, maker: LibraryMasks):
    mask = one(maker, matcher(compiler, Constraint(regex="(?s:.)*")), tokens_of("anything"))
    spelled = {token_id for token_id in range(VOCAB_SIZE) if TOKENIZER.token_bytes(token_id)}
    assert allowed(mask) <= spelled | {END_ID}
    assert len(allowed(mask)) > 200


def test_what_comes_before_the_answer_is_free(compiler: ConstraintCompiler, maker: LibraryMasks):
    own = matcher(compiler, Constraint(choices=("no",)), ANSWER_ID)
    thoughts = tokens_of("well no yes")
    assert one(maker, own, []) is None
    assert one(maker, own, thoughts) is None
    first = one(maker, own, [*thoughts, Token(ANSWER_ID)])
    assert allowed(first) == allowed(one(maker, matcher(compiler, Constraint(choices=("no",))), []))


def test_a_sequence_that_lost_tokens_is_followed_anew(compiler: ConstraintCompiler, maker: LibraryMasks):
    for opens_answer in (None, ANSWER_ID):
        own = matcher(compiler, Constraint(regex="[0-9]{3}x"), opens_answer)
        before = [] if opens_answer is None else [Token(opens_answer)]
        masks = [one(maker, own, [*before, *tokens_of(text)]) for text in ("", "1", "12", "1", "123", "")]
        assert [allowed(mask) for mask in masks[3:]] == [allowed(masks[1]), allowed(masks[4]), allowed(masks[0])]
        assert allowed(masks[4]) != allowed(masks[1])


def test_a_token_that_may_not_come_fails_its_answer_alone(compiler: ConstraintCompiler, maker: LibraryMasks):
    wrong = MaskRequest(matcher(compiler, Constraint(choices=("no",))), tokens_of("yes"))
    right = MaskRequest(matcher(compiler, Constraint(choices=("no",))), tokens_of("n"))
    results = maker.masks([wrong, right, wrong])
    assert [type(result) for result in results] == [ConstraintFailed, np.ndarray, ConstraintFailed]


class Maker:
    """Makes the matcher itself the mask, or fails."""

    def __init__(self) -> None:
        self.generated: list[list[Token]] = []

    def masks(self, requests: Sequence[MaskRequest]) -> list[Any]:
        self.generated += [list(request.generated) for request in requests]
        return [ConstraintFailed() if item.matcher == "fails" else item.matcher for item in requests]


def running(matcher: Any, num_generated: int = 0) -> Any:
    made = new_sequence(3)
    made.request.matcher = matcher
    made.tokens += [Token(90 + number) for number in range(num_generated)]
    return made


def test_only_sequences_with_a_constraint_that_are_still_here_get_one():
    gone = running("gone")
    gone.state = SequenceState.FINISHED
    batch = Batch.of_decode([running(None), running("mine", 2), gone, running("fails"), running("yours")])
    maker = Maker()
    masks, failed = step_masks(batch, maker.masks)
    assert masks == [None, "mine", None, None, "yours"]
    assert failed == [batch.decode[3]]
    assert maker.generated == [[Token(90), Token(91)], [], []]


def test_without_a_constraint_nothing_is_made():
    assert step_masks(Batch.of_decode([running(None)]), None) == ([None], [])
