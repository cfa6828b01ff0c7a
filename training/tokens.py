"""Moondream Nano's tokenizer: byte-level merges over the world's own sentences, path numbers as whole tokens."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.shapes import STEP, UNITS_PER_SIDE

VOCAB_SIZE = 1024
NUM_SPECIAL = 16
PATH_NUMBERS = tuple(str(number) for number in range(STEP, UNITS_PER_SIDE + 1, STEP))
_TASK_WORDS = ["query", "caption", "detect", "point", "segment", "short", "normal", "long"]


def train_tokenizer(texts: Iterable[str], file: Path) -> None:
    """Learn merges from `texts` and write a `tokenizer.json`.

    Digits stand alone in text, so that sums and printed numbers are spelled. The path numbers have no merges:
    no text becomes one, only an outline does.
    """
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    library.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>"] + [f"<|md_reserved_{index}|>" for index in range(NUM_SPECIAL - 1)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(PATH_NUMBERS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator([*texts, *(word for word in _TASK_WORDS for _ in range(10_000))], trainer)
    data = json.loads(library.to_str())
    vocabulary = data["model"]["vocab"]
    for number in PATH_NUMBERS:
        vocabulary[number] = len(vocabulary)
    assert len(vocabulary) <= VOCAB_SIZE, f"{len(vocabulary)} tokens"
    file.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")))


def templates(encode: Tokenizer) -> dict[str, dict[str, list[int]]]:
    """The prompt templates in this vocabulary, in the form that `config.json` keeps them."""
    ids = {word: encode.encode(word, add_special_tokens=False).ids for word in _TASK_WORDS}
    plain = {
        skill: {"prefix": [1, *ids[skill], 2], "suffix": [3]} for skill in ("query", "detect", "point", "segment")
    }
    lengths = {length: [1, *ids["caption"], 2, *ids[length], 3] for length in ("short", "normal", "long")}
    return {"caption": lengths, **plain}
