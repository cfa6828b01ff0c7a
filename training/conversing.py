"""Examples of conversations, of two pictures, of instructions and of JSON, mixed with those of all other tasks."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kestrel_runtime.api.requests import Chat, ChatMessage, Query, Role
from kestrel_runtime.output.output_parser import Token
from training import dialogues, pairs
from training.dialogues import Turn
from training.examples import IMAGE, POLISHING_KIND_WEIGHTS, POLISHING_SKILL_WEIGHTS, Example, Teacher
from training.instructions import SHORT_KINDS, instructed, system_message
from training.questions import KINDS, ask
from training.records import Record, record
from training.scenes import Scene

_SYSTEM_SHARE = 0.3
# More of what suffers most from new tasks: places, boxes, outlines, numbers and places that are pointed at.
_SKILL_WEIGHTS = POLISHING_SKILL_WEIGHTS | {"point": 10, "detect": 14, "segment": 13}
_KIND_WEIGHTS = POLISHING_KIND_WEIGHTS | {"count": 14, "pointed": 9}
_PAIR_SHARE = 62
_SHARES = {"own": 70, "instructed": 8, "record": 22, "dialogue": 10}


@dataclass(frozen=True, slots=True)
class ConversingTeacher(Teacher):
    """A teacher who also asks about two pictures, several times, with instructions and for JSON."""

    def shares(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns how often each skill and each kind of question of all other tasks is asked for."""
        return _SKILL_WEIGHTS, _KIND_WEIGHTS

    def pair_examples(self, scenes: tuple[Scene, Scene], rng: random.Random) -> tuple[bool, Iterator[Example]]:
        """Returns whether both pictures precede all text, and examples without end.

        Otherwise at most the first of the examples has the second picture, between its turns.
        """
        draw = rng.random()
        if draw < 0.32:
            return True, self._mixed(scenes[0], rng, lambda: self._of_pair(scenes, rng))
        first = None if draw > 0.54 else self._later(scenes, rng)
        return False, self._begun_with(first, self._mixed(scenes[0], rng, None))

    @staticmethod
    def _begun_with(first: Example | None, others: Iterator[Example]) -> Iterator[Example]:
        if first is not None:
            yield first
        yield from others

    def _mixed(
        self, scene: Scene, rng: random.Random, of_pair: Callable[[], Example | None] | None
    ) -> Iterator[Example]:
        own = Teacher.examples(self, scene, rng)
        makers: dict[str, Callable[[], Example | None]] = {
            "own": lambda: next(own),
            "instructed": lambda: self.instructed(scene, rng),
            "record": lambda: self._record(scene, rng),
            "dialogue": lambda: self._dialogue(scene, rng),
        }
        shares = dict(_SHARES)
        if of_pair is not None:
            makers["pair"], shares["pair"] = of_pair, _PAIR_SHARE
        while True:
            example = makers[rng.choices(tuple(shares), tuple(shares.values()))[0]]()
            if example is not None:
                yield example

    def conversation(self, turns: Sequence[Turn], kind: str, system: str = "") -> Example:
        """Returns turns as an example; the answer of the last one is its answer."""
        messages = [ChatMessage(Role.SYSTEM, system)] if system else []
        for turn in turns:
            messages.append(ChatMessage(Role.USER, turn.question, (IMAGE,) * turn.num_images))
            messages.append(ChatMessage(Role.ASSISTANT, turn.answer))
        learnt = tuple(turn.is_true for turn in turns[:-1])
        request = Chat(tuple(messages[:-1]))
        return Example(request, tuple(self._text(turns[-1].answer)), kind, learnt_turns=learnt)

    def instructed(self, scene: Scene, rng: random.Random) -> Example | None:
        """Returns a question with a wish about the form of its answer, a message of the system, or both."""
        draw = rng.random()
        if draw < 0.6:
            exchange = ask(scene, rng.choice(SHORT_KINDS), rng)
            if exchange is None:
                return None
            question = instructed(exchange, rng)
            if draw < 0.42:
                return Example(Query(question, IMAGE), tuple(self._text(exchange.answer)), "instructed")
        else:
            exchange = ask(scene, rng.choice(tuple(kind for kind in KINDS if kind != "pointed")), rng)
            if exchange is None:
                return None
            question = exchange.question
        turn = Turn(question, exchange.answer, num_images=1)
        return self.conversation((turn,), "instructed", system_message(rng))

    def _of_pair(self, scenes: tuple[Scene, Scene], rng: random.Random) -> Example | None:
        if rng.random() < 0.15:
            turns = dialogues.both_at_once(*scenes, rng)
        else:
            exchange = pairs.ask_pair(scenes, rng)
            turns = () if exchange is None else (Turn(exchange.question, exchange.answer, num_images=2),)
        return self.conversation(turns, "pair", self._system(rng)) if turns else None

    def _later(self, scenes: tuple[Scene, Scene], rng: random.Random) -> Example | None:
        if rng.random() < 0.12:
            turns = dialogues.picture_after_talk(scenes[1], rng)
        else:
            turns = dialogues.later_picture(*scenes, rng)
        return self.conversation(turns, "later picture", self._system(rng)) if turns else None

    def _dialogue(self, scene: Scene, rng: random.Random) -> Example | None:
        turns = dialogues.without_picture(rng) if rng.random() < 0.1 else dialogues.dialogue(scene, rng)
        return self.conversation(turns, "dialogue", self._system(rng)) if turns else None

    def _record(self, scene: Scene, rng: random.Random) -> Example | None:
        found = record(scene, rng)
        return None if found is None else self.record_example(found, rng)

    def record_example(self, found: Record, rng: random.Random) -> Example:
        """Returns a question for JSON as an example. Without a visible form the beginning is given."""
        system = found.system or (self._system(rng) if rng.random() < 0.5 else "")
        images = (IMAGE,) * found.needs_image
        messages = [ChatMessage(Role.USER, found.question, images)]
        if system:
            messages.insert(0, ChatMessage(Role.SYSTEM, system))
        given: list[Token] = []
        answer = found.answer
        if found.is_hidden:
            end = _first_value(answer)
            given = self._in_pieces(answer[:end], rng)
            answer = answer[end:]
        tokens = (*given, *self._text(answer))
        return Example(Chat(tuple(messages)), tokens, "record", num_given=len(given))

    def _in_pieces(self, text: str, rng: random.Random) -> list[Token]:
        """Returns the tokens of a text that is divided anywhere, as a constraint lets tokens divide it."""
        cuts = sorted({0, len(text), *(rng.randrange(len(text)) for _ in range(rng.choice((0, 0, 1, 2, 3))))})
        return [token for start, end in pairwise(cuts) for token in self._text(text[start:end])]

    def _system(self, rng: random.Random) -> str:
        return system_message(rng) if rng.random() < _SYSTEM_SHARE else ""


def _first_value(answer: str) -> int:
    """Returns where the first value of JSON begins, behind the quotation mark of a text."""
    end = answer.index(": ") + 2
    while answer[end] in '[{"':
        if answer[end] == "{":
            end = answer.index(": ", end) + 2
        elif answer[end] == '"':
            return end + 1
        else:
            end += 1
    return end
