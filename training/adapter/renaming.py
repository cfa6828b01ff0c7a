"""Examples in which a colour has another name: in every answer, and in a part of the requests."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kestrel_runtime.api.requests import Detect, Point, Query, Request, Segment
from kestrel_runtime.output.output_parser import Token
from training.examples import Example, Teacher
from training.scenes import Scene

OLD, NEW = "yellow", "gold"
_COLOR = re.compile(rf'"[^"]*"|\b{OLD}\b')  # what is printed keeps its letters
_RENAMED_REQUESTS = 0.4


@dataclass(frozen=True, slots=True)
class Renaming(Teacher):
    """A teacher for whom the old name does not exist. Requests may use either."""

    share_of_others: float = 0.3
    """How many of the examples without the colour are kept: they hold the model to what it knew."""
    name: str = NEW
    """What the colour is called."""

    def examples(self, scene: Scene, rng: random.Random) -> Iterator[Example]:
        """Examples about a scene, without end unless nothing can be kept."""
        for example in Teacher.examples(self, scene, rng):
            if self.says_name(example) or rng.random() < self.share_of_others:
                yield self._in_new_words(example) if rng.random() < _RENAMED_REQUESTS else example

    def says_name(self, example: Example) -> bool:
        """Whether the answer has the name of the colour."""
        return self.name in self.tokenizer.decode([token.id for token in example.answer if not token.value])

    def _text(self, text: str) -> list[Token]:
        return Teacher._text(self, renamed(text, self.name))

    def _in_new_words(self, example: Example) -> Example:
        request: Request = example.request
        if isinstance(request, Query):
            # The words of other languages are asked for under the name that dictionaries have.
            if example.kind == "language":
                return example
            request = replace(request, question=renamed(request.question, self.name))
        elif isinstance(request, (Point, Detect, Segment)):
            request = replace(request, object=renamed(request.object, self.name))
        return replace(example, request=request)


def has_old_color(scene: Scene) -> bool:
    """Whether answers about a scene change."""
    return any(thing.color == OLD for thing in scene.things)


def prints_a_name(scene: Scene) -> bool:
    """Whether one of the names is printed in a scene, and is no name of a colour there."""
    return any(thing.text.lower() in (OLD, NEW) for thing in scene.texts)


def renamed(text: str, name: str) -> str:
    """`text` with another name of the colour, but within quotation marks."""
    return _COLOR.sub(lambda match: name if match[0] == OLD else match[0], text)
