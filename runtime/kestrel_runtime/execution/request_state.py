"""What the device remembers of each active sequence between its steps, so that no step waits for the host.

A slot holds the last token drawn and where in its grammar the sequence stands. Steps read and write slots on the
device; the host writes one when a sequence begins its prompt.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from kestrel_runtime.execution.token_rules import RuleTable
from kestrel_runtime.execution.transfer import to_device
from kestrel_runtime.scheduling.sequence import Sequence

COORDINATE, SIZE = 1, 2
"""Kinds of tokens with a value, by how many numbers that has; text is of kind 0."""
_UNLIMITED = 2**62


class Slots:
    """Rows for `num_slots` sequences and, last, one of nobody's for what pads a batch."""

    def __init__(self, num_slots: int, max_pages: int, rules: RuleTable, device: torch.device) -> None:
        self._rules = rules
        self._device = device
        self._free = list(range(num_slots))[::-1]
        self._slot_of: dict[int, int] = {}  # by sequence id
        self.nobody = num_slots
        # Token id, its kind, row of the rule table, tokens drawn, budget.
        self.numbers = torch.zeros(num_slots + 1, 5, dtype=torch.int64, device=device)
        self.values = torch.zeros(num_slots + 1, 2, device=device)
        self._pages = np.zeros((num_slots + 1, max_pages), dtype=np.int32)
        self._num_pages = [0] * (num_slots + 1)
        self._may_draw = np.zeros((num_slots + 1, 2), dtype=np.bool_)

    def open(self, *sequences: Sequence) -> None:
        """Give sequences that begin their prompts slots, or write their own anew."""
        numbers, values = [], []
        for sequence in sequences:
            if sequence.id not in self._slot_of:
                self._slot_of[sequence.id] = self._free.pop()
            slot, parser, token = self._slot_of[sequence.id], sequence.parser, sequence.tokens[-1]
            budget = _UNLIMITED if parser.budget is None else parser.budget
            row = self._rules.row(parser.grammar, parser.state)
            numbers.append((token.id, len(token.value), row, parser.num_consumed, budget))
            values.append((*token.value, 0.0, 0.0)[:2])
            self._num_pages[slot] = 0
            self._may_draw[slot] = self._rules.may_draw(parser.grammar)
        if sequences:
            slots = to_device(self.of(sequences), torch.int64, self._device)
            self.numbers[slots] = to_device(numbers, torch.int64, self._device)
            self.values[slots] = to_device(values, torch.float32, self._device)

    def close(self, sequence: Sequence) -> None:
        """Take the slot back, if the sequence has one."""
        slot = self._slot_of.pop(sequence.id, None)
        if slot is not None:
            self._free.append(slot)

    def of(self, sequences: Iterable[Sequence]) -> list[int]:
        """The slots of sequences that have one."""
        return [self._slot_of[sequence.id] for sequence in sequences]

    def may_draw(self, sequences: list[Sequence]) -> tuple[bool, bool]:
        """Whether any of them may draw a coordinate, and whether any may draw a size."""
        possible = self._may_draw[self.of(sequences)]
        return bool(possible[:, 0].any()), bool(possible[:, 1].any())

    def page_table(self, sequences: list[Sequence], width: int | None = None) -> np.ndarray:
        """int32 [B, width], by default as wide as the longest: each sequence's pages.

        Past its end a sequence's first page stands, so that what is read there, and masked, is its own.
        """
        slots = self.of(sequences)
        for slot, sequence in zip(slots, sequences, strict=True):
            known = self._num_pages[slot]
            if known != len(sequence.pages):
                if not known:
                    self._pages[slot] = sequence.pages[0]
                self._pages[slot, known : len(sequence.pages)] = sequence.pages[known:]
                self._num_pages[slot] = len(sequence.pages)
        return self._pages[slots, : max(self._num_pages[slot] for slot in slots) if width is None else width]

    def advance(self, slots: Tensor, ids: Tensor, kinds: Tensor, values: Tensor) -> None:
        """Write what was drawn: slots, ids, kinds int64 [B], values float32 [B, 2]."""
        _, _, rows, num_drawn, budget = self.numbers[slots].unbind(1)
        num_drawn = num_drawn + 1
        rows = self._rules.after(rows, ids, num_drawn >= budget)
        self.numbers[slots] = torch.stack((ids, kinds, rows, num_drawn, budget), dim=1)
        self.values[slots] = values
