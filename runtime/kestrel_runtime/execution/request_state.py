"""The request state table: what the device holds of each active sequence between steps.

A row holds the last token, the state of the sequence's grammar, its sampling settings and its pages. The host
writes a row when a sequence starts its prompt; from then on steps read and write it on the device, so that no step
waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kestrel_runtime.execution import logit_adjustments
from kestrel_runtime.execution.logit_adjustments import AdjustmentSettings, LogitAdjustments
from kestrel_runtime.execution.transfer import PackedLayout, host_buffer
from kestrel_runtime.interfaces.token_grammar import Grammar
from kestrel_runtime.scheduling import sequence as scheduling

_UNLIMITED = 2**62
_NUM_INTEGERS, _NUM_DRAW_SETTINGS = 6, 4
_NUM_SETTINGS = _NUM_DRAW_SETTINGS + logit_adjustments.NUM_SETTINGS


class RowState(NamedTuple):
    """Integer columns of the rows that were read: int64 [B] each."""

    token_ids: Tensor
    """The last token, whose keys and values are not in the cache yet."""
    num_values: Tensor
    """How many values that token carries; 0 for text."""
    rules: Tensor
    """Row of the token rules."""
    num_sampled: Tensor
    budgets: Tensor
    """Tokens that may be sampled before the grammar's exhausted states apply."""
    seeds: Tensor


class DrawSettings(NamedTuple):
    """How tokens are drawn: float32 [B] each."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    """0 for no limit."""
    min_p: Tensor


class RequestState:
    """Rows for `num_rows` sequences and a last one that pads steps. Host side: engine thread only."""

    def __init__(
        self,
        device: torch.device,
        rule_row: Callable[[Grammar, int], int],
        value_kinds: Callable[[Grammar], int],
        *,
        num_rows: int,
        max_pages: int,
        values_per_token: int,
        vocab_size: int,
        has_adapters: bool = False,
    ) -> None:
        """`rule_row` tells the row of the token rules for a state of a grammar; `value_kinds`, as a bit mask, which
        kinds of values a sequence under a grammar may sample."""
        self.padding_row = num_rows
        self.max_pages = max_pages
        self.device = device
        self.page_table = torch.zeros(num_rows + 1, max_pages, dtype=torch.int32, device=device)
        """int32; past a sequence's end its first page is repeated: masked reads stay within its own pages."""
        self.adapter_slots = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        """The slot of each row's adapter; 0 for none."""
        self._integers = torch.zeros(num_rows + 1, _NUM_INTEGERS, dtype=torch.int64, device=device)
        self._floats = torch.zeros(num_rows + 1, _NUM_SETTINGS + values_per_token, device=device)
        self._floats[:, _NUM_DRAW_SETTINGS:_NUM_SETTINGS] = torch.tensor(logit_adjustments.NEUTRAL)
        self.adjustments = LogitAdjustments(num_rows + 1, vocab_size, device)
        """Of sequences with `controls`."""
        self._rule_row = rule_row
        self._value_kinds = value_kinds
        self._num_values = values_per_token
        self._has_adapters = has_adapters
        self._free = list(range(num_rows))[::-1]
        self._row_of: dict[int, int] = {}  # by sequence id
        self._kinds = [0] * (num_rows + 1)
        self._num_pages = [0] * (num_rows + 1)

    def open(self, sequences: Sequence[scheduling.Sequence]) -> None:
        """Give a row to each sequence that starts its prompt; one that has a row keeps it, rewritten.

        One copy to the device, in stream order.
        """
        if not sequences:
            return
        count = len(sequences)
        layout = PackedLayout(
            {
                "rows": ("int64", (count,)),
                "integers": ("int64", (count, _NUM_INTEGERS)),
                "floats": ("float32", (count, _NUM_SETTINGS + self._num_values)),
                "adapter_slots": ("int64", (count,)),
                "pages": ("int32", (count, self.max_pages)),
            }
        )
        packed = host_buffer(layout.num_bytes, self.device)
        fields = layout.arrays(packed)
        fields["floats"][:] = 0
        for place, sequence in enumerate(sequences):
            if sequence.id not in self._row_of:
                self._row_of[sequence.id] = self._free.pop()
            row, parser, token = self._row_of[sequence.id], sequence.parser, sequence.tokens[-1]
            fields["rows"][place] = row
            fields["integers"][place] = (
                token.id,
                len(token.value),
                self._rule_row(parser.grammar, parser.state),
                sequence.num_generated,
                _UNLIMITED if parser.budget is None else parser.budget,
                sequence.seed,
            )
            controls = sequence.controls
            fields["floats"][place, : _NUM_SETTINGS + len(token.value)] = (
                sequence.temperature,
                sequence.top_p,
                0 if controls is None else controls.top_k or 0,
                0 if controls is None else controls.min_p or 0,
                *(logit_adjustments.NEUTRAL if controls is None else logit_adjustments.settings_of(controls)),
                *token.value,
            )
            fields["adapter_slots"][place] = sequence.adapter_slot
            fields["pages"][place] = sequence.pages[0]
            fields["pages"][place, : len(sequence.pages)] = sequence.pages
            self._kinds[row] = self._value_kinds(parser.grammar)
            self._num_pages[row] = len(sequence.pages)
        sent = layout.tensors(packed.to(self.device, non_blocking=True))
        self._integers[sent["rows"]] = sent["integers"]
        self._floats[sent["rows"]] = sent["floats"]
        self.page_table[sent["rows"]] = sent["pages"]
        if self._has_adapters:
            self.adapter_slots[sent["rows"]] = sent["adapter_slots"]
        controlled = [sequence for sequence in sequences if sequence.controls is not None]
        if controlled:
            self.adjustments.open(controlled, [self.row(sequence) for sequence in controlled])

    def close(self, sequence: scheduling.Sequence) -> None:
        """Free the sequence's row, if it has one."""
        row = self._row_of.pop(sequence.id, None)
        if row is not None:
            self._free.append(row)

    def row(self, sequence: scheduling.Sequence) -> int:
        """The row of a sequence that has one."""
        return self._row_of[sequence.id]

    def value_kinds(self, sequences: Iterable[scheduling.Sequence]) -> int:
        """Bit mask of the kinds of values that any of the sequences may sample."""
        kinds = 0
        for sequence in sequences:
            kinds |= self._kinds[self._row_of[sequence.id]]
        return kinds

    def take_new_page(self, sequence: scheduling.Sequence) -> int:
        """The page that a decode step adds to the sequence's row, which counts as written; -1 for none."""
        row, count = self._row_of[sequence.id], len(sequence.pages)
        if self._num_pages[row] == count:
            return -1
        assert self._num_pages[row] == count - 1, "a token takes one new page at most"
        self._num_pages[row] = count
        return sequence.pages[-1]

    def read(self, rows: Tensor) -> RowState:
        """rows: int64 [B]."""
        return RowState(*self._integers[rows].unbind(1))

    def draw_settings(self, rows: Tensor) -> DrawSettings:
        """rows: int64 [B]."""
        return DrawSettings(*self._floats[rows, :_NUM_DRAW_SETTINGS].unbind(1))

    def adjustment_settings(self, rows: Tensor) -> AdjustmentSettings:
        """rows: int64 [B]."""
        return AdjustmentSettings(*self._floats[rows, _NUM_DRAW_SETTINGS:_NUM_SETTINGS].unbind(1))

    def values(self, rows: Tensor) -> Tensor:
        """Values of the last tokens of rows int64 [B]: float32 [B, V]."""
        return self._floats[rows, _NUM_SETTINGS:]

    def add_pages(self, rows: Tensor, positions: Tensor, new_pages: Tensor, page_size: int) -> None:
        """Write new pages, int32 [B] with -1 for none, to where positions int64 [B] need them; rows: int64 [B]."""
        columns = positions.clamp(min=0) // page_size
        known = self.page_table[rows, columns]
        self.page_table[rows, columns] = torch.where(new_pages >= 0, new_pages, known)

    def write(self, rows: Tensor, integers: RowState, values: Tensor) -> None:
        """Write rows int64 [B] whole, but for settings and pages; values: float32 [B, V]."""
        self._integers[rows] = torch.stack(integers, dim=1)
        self._floats[rows, _NUM_SETTINGS:] = values
