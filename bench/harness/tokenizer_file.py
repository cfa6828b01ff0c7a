"""A `tokenizer.json` of a published Moondream's size, for weights that mean nothing.

Byte-level as the published one, with the same control ids; every word of the harness's questions is one token, so
that prompts are as long as they would be with the published tokenizer. The rest of the ids spell numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

NUM_CONTROL_TOKENS = 10
END_OF_TEXT = "<|endoftext|>"


def write_tokenizer(file: Path, num_tokens: int, words: Iterable[str]) -> None:
    """Write a tokenizer of `num_tokens` ids in which each of `words`, blanks before them included, is one."""
    control = [END_OF_TEXT, *(f"<|control_{number}|>" for number in range(1, NUM_CONTROL_TOKENS))]
    names = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    known = set(names)
    merges: list[tuple[str, str]] = []
    for word in dict.fromkeys(words):
        letters = _spelled(word)
        for end in range(2, len(letters) + 1):
            # A word grows from its front. Fronts are blanks or capitals, which no word has inside.
            if letters[:end] not in known:
                known.add(letters[:end])
                names.append(letters[:end])
                merges.append((letters[: end - 1], letters[end - 1]))
    names += [_spelled(f" {number:05d}") for number in range(num_tokens - len(names))]
    if len(names) > num_tokens:
        raise ValueError(f"{num_tokens} tokens are too few: the words alone need {len(names)}")
    library = tokenizers.Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(control)
    library.save(str(file))


def _spelled(text: str) -> str:
    """Text in the byte-level alphabet; blanks and plain letters are all that is needed."""
    return text.replace(" ", "Ġ")
