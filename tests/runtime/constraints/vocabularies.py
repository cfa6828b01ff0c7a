"""A compiler for the vocabulary of the built-in model, and texts as its tokens."""

from functools import partial

from kestrel_runtime.constraints.compiler import ConstraintCompiler, new_vocabulary
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.output.output_parser import Token
from tests.runtime.models.second_family.checkpoint import NANO_TOKENIZER

TOKENIZER = Tokenizer.from_file(NANO_TOKENIZER)
VOCAB_SIZE = TOKENIZER.vocab_size + 13
"""More than the tokenizer has, as models do."""
END_ID = 0


def new_compiler(num_processors: int = 4) -> ConstraintCompiler:
    return ConstraintCompiler(partial(new_vocabulary, TOKENIZER, VOCAB_SIZE), num_processors)


def tokens_of(text: str) -> list[Token]:
    return [Token(token_id) for token_id in TOKENIZER.encode(text)]
