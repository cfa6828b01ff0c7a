"""What the tests of skills share: both generations' configurations, and a model's part played by hand."""

from collections.abc import Iterable
from typing import Any, TypeVar

from kestrel_runtime.api.events import Output, Piece, TextChannel, TextDelta
from kestrel_runtime.api.requests import BoxRef, PointRef
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.output.output_parser import OutputParser, Token
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL, model_config
from tests.runtime.models.moondream.full_size import published_config

MOONDREAM_2 = MoondreamConfig.from_dict(model_config(MD2_SMALL))
MOONDREAM_3 = MoondreamConfig.from_dict(model_config(MD3_SMALL))
PUBLISHED_2 = published_config("moondream2")
PUBLISHED_3 = published_config("moondream3")
TOKENIZER = Tokenizer.from_file(MD2_SMALL / "tokenizer.json")

Kind = TypeVar("Kind", bound=Output)

IMAGE = b"never decoded here"
EOS, ANSWER, THINKING, COORDINATE, SIZE, START_POINTS, END_GROUND = 0, 3, 4, 5, 6, 7, 9
REFERENCES = (PointRef(0.25, 0.75), BoxRef(0.1, 0.2, 0.5, 0.4))
REFERENCE_TOKENS = [
    Token(COORDINATE, (0.25,)),
    Token(COORDINATE, (0.75,)),
    Token(COORDINATE, (0.3,)),
    Token(COORDINATE, (0.30000000000000004,)),
    Token(SIZE, (0.4, 0.2)),
]

ID_OF_BYTE = {
    TOKENIZER.token_bytes(id)[0]: id for id in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(id)) == 1
}


def plain(ids: Iterable[int]) -> list[Token]:
    return [Token(id) for id in ids]


def words(text: str) -> list[Token]:
    """Text as the model might write it."""
    return plain(TOKENIZER.encode(text))


def spelled(text: str) -> list[Token]:
    """Text with every byte a token of its own."""
    return plain(ID_OF_BYTE[byte] for byte in text.encode())


def coordinate(value: float) -> Token:
    return Token(COORDINATE, (value,))


def size(width: float, height: float) -> Token:
    return Token(SIZE, (width, height))


def consume(parser: OutputParser, tokens: Iterable[Token]) -> list[Any]:
    """Have a parser consume tokens that its rule lets pass; returns the pieces that it emits."""
    deltas: list[Piece] = []
    for token in tokens:
        assert parser.finish_reason is None, f"{token} comes after the end"
        assert may_come(parser, token), f"{token} breaks {parser.rule}"
        deltas += parser.consume(token)
    return deltas


def output(parser: OutputParser, kind: type[Kind]) -> Kind:
    """A parser's output, which must be of this kind."""
    parsed = parser.output()
    assert isinstance(parsed, kind)
    return parsed


def may_come(parser: OutputParser, token: Token) -> bool:
    rule = parser.rule
    if token.value and not rule.is_spatial:
        return False
    return (rule.allowed is None or token.id in rule.allowed) and token.id not in rule.suppressed


def emitted(deltas: Iterable[TextDelta], channel: TextChannel = TextChannel.ANSWER) -> str:
    """The text of one channel. Checks that its deltas are numbered without gap and are never empty."""
    text, num_tokens = "", 0
    for delta in deltas:
        if delta.channel is channel:
            assert delta.text
            assert delta.token_index == num_tokens
            text, num_tokens = text + delta.text, num_tokens + delta.num_tokens
    return text
