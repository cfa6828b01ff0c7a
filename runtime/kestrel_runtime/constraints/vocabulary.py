"""The tokens of a model as the grammar library and JSON know them."""

from __future__ import annotations

from dataclasses import dataclass

import llguidance

from kestrel_runtime.constraints.json_answer import JsonTokens
from kestrel_runtime.loading.tokenizer import Tokenizer


class _Described:
    """What `llguidance.TokenizerWrapper` asks for."""

    def __init__(self, tokens: list[bytes], special: list[int], end_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end_id
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        """How text is spelled that must come: not asked by grammars in which nothing is forced."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model. `end_id` ends an answer."""

    library: llguidance.LLTokenizer
    json: JsonTokens
    end_id: int


def new_vocabulary(tokenizer: Tokenizer, vocab_size: int, end_id: int) -> Vocabulary:
    """All ids below `vocab_size`; `end_id` ends an answer. Takes about 0.15 s for 50,000 tokens.

    Control tokens, and ids that the tokenizer does not have, never come in an answer.
    """
    spelled = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    spelled[end_id] = b""
    json_tokens = JsonTokens(tuple(spelled))
    special = [token_id for token_id, spelling in enumerate(spelled) if not spelling]
    for token_id in special:
        spelled[token_id] = b"<|control %d|>" % token_id
    described = llguidance.TokenizerWrapper(_Described(spelled, special, end_id))
    return Vocabulary(llguidance.LLTokenizer(described, n_vocab=vocab_size), json_tokens, end_id)
