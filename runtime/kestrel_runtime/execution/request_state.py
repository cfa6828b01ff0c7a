"""Holds the state of each active sequence on the device between steps, in a table.

A row holds the last token, the state of the sequence's grammar, its sampling settings and its pages. The host
writes a row when a sequence starts its prompt; from then on steps read and write it on the device, so that no step
waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, LiteralString, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kestrel_runtime.execution.logits import (
    NEUTRAL,
    AdjustmentSettings,
    AllowedTokens,
    LogitAdjustments,
    settings_of,
)
from kestrel_runtime.execution.transfer import PackedLayout, StagedCopies
from kestrel_runtime.output.output_parser import Grammar
from kestrel_runtime.scheduling.sequence import TokenSequence

_UNLIMITED = 2**62
_IS_RANDOM, _IS_CONTROLLED, _WITH_LOGPROBS, _IS_RESTRICTED, _USES_ADAPTERS = 1, 2, 4, 8, 16
_NUM_FLAGS = 5
_NUM_INTEGERS, _NUM_DRAW_SETTINGS = 6, 4
_NUM_SETTINGS = _NUM_DRAW_SETTINGS + len(NEUTRAL)


class RowState(NamedTuple):
    """Integer columns of the rows that were read: int64 [B] each."""

    token_ids: Tensor
    """The last token, whose keys and values are not in the cache yet."""
    num_values: Tensor
    """Number of values that the token carries; 0 for text."""
    rules: Tensor
    """Row of the token rules."""
    num_sampled: Tensor
    budgets: Tensor
    """Tokens that may be sampled before the grammar's exhausted states apply."""
    seeds: Tensor


class SampleNeeds(NamedTuple):
    """The features of sampling that a batch may need; others are not computed. Part of a graph's key."""

    is_random: bool
    value_kinds: int
    """Bit mask of the family: kinds of values that tokens may be sampled with, and those that are fed in carry."""
    is_controlled: bool = False
    """True if a row has `TokenSequence.request.controls`."""
    with_logprobs: bool = False
    """True if a row has `TokenSequence.request.num_logprobs`."""
    is_restricted: bool = False
    """True if a row has `TokenSequence.request.matcher`, so that the step samples under masks."""

    def include(self, other: SampleNeeds) -> bool:
        """Returns True if a step with these needs gives a row of a batch with the needs `other` the same sample.

        The mask of a row is only valid in a step that is restricted. Controls and logprobs have graphs of their
        own.
        """
        return (
            self.is_random >= other.is_random
            and self.value_kinds & other.value_kinds == other.value_kinds
            and self[2:] == other[2:]
        )


class RowNeeds(NamedTuple):
    """The features of a step that any of several rows needs."""

    sampling: SampleNeeds
    uses_adapters: bool


class DrawSettings(NamedTuple):
    """The settings by which tokens are drawn: float32 [B] each."""

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
    ) -> None:
        """Takes `rule_row`, which returns the row of the token rules for a state of a grammar, and `value_kinds`, a
        bit mask of the kinds of values that a sequence under a grammar may sample.
        """
        self.padding_row = num_rows
        self.max_pages = max_pages
        self.device = device
        num_floats = _NUM_SETTINGS + values_per_token
        self._record = np.dtype(
            {
                "names": ["integers", "adapter_slot", "floats", "pages"],
                "formats": [("int64", _NUM_INTEGERS), "int64", ("float32", num_floats), ("int32", max_pages)],
            },
            align=True,
        )
        # One table, so that one copy writes whole rows; its columns are views.
        self._row_words = self._record.itemsize // torch.int64.itemsize
        self._table = torch.zeros(num_rows + 1, self._row_words, dtype=torch.int64, device=device)
        self.page_table = self._columns("pages", torch.int32, max_pages)
        """int32; past a sequence's end its first page is repeated: masked reads stay within its own pages."""
        self.adapter_slots = self._columns("adapter_slot", torch.int64, 1)[:, 0]
        """The slot of each row's adapter; 0 for none."""
        self._integers = self._columns("integers", torch.int64, _NUM_INTEGERS)
        self._floats = self._columns("floats", torch.float32, num_floats)
        self._floats[:, _NUM_DRAW_SETTINGS:_NUM_SETTINGS] = torch.tensor(NEUTRAL)
        self._opened = StagedCopies(self._open_layout(num_rows).num_bytes, device)
        self.adjustments = LogitAdjustments(num_rows + 1, vocab_size, device)
        """Rows of sequences with `controls`."""
        self.allowed = AllowedTokens(num_rows + 1, vocab_size, device)
        """Rows of sequences with a `matcher`."""
        self._rule_row = rule_row
        self._value_kinds = value_kinds
        self._free = list(range(num_rows))[::-1]
        self._row_of: dict[int, int] = {}  # by sequence id
        self._flags = [0] * (num_rows + 1)

    def open(self, sequences: Sequence[TokenSequence]) -> None:
        """Gives a row to each sequence that starts its prompt; one that has a row keeps it, rewritten. In stream
        order."""
        if not sequences:
            return
        # Steps of similar size share their views: what is left of a size repeats the last sequence.
        size = min(1 << (len(sequences) - 1).bit_length(), self.padding_row)
        fields = self._opened.send(
            size, partial(self._open_layout, size), lambda host: self._fill_rows(host, sequences)
        )
        self._table.index_copy_(0, fields["rows"], fields["records"])
        controlled = [sequence for sequence in sequences if sequence.request.controls is not None]
        if controlled:
            self.adjustments.open(controlled, [self.row(sequence) for sequence in controlled])

    def _fill_rows(self, host: dict[str, NDArray[Any]], sequences: Sequence[TokenSequence]) -> None:
        count, rows = len(sequences), host["rows"]
        records = host["records"].view(self._record)[:, 0]
        integers, floats, pages = records["integers"], records["floats"], records["pages"]
        floats[:] = 0
        for place, sequence in enumerate(sequences):
            if sequence.id not in self._row_of:
                self._row_of[sequence.id] = self._free.pop()
            row, parser, token = self._row_of[sequence.id], sequence.request.parser, sequence.tokens[-1]
            rows[place] = row
            integers[place] = (
                token.id,
                len(token.value),
                self._rule_row(parser.grammar, parser.state),
                sequence.num_generated,
                _UNLIMITED if parser.budget is None else parser.budget,
                sequence.request.seed,
            )
            controls = sequence.request.controls
            floats[place, : _NUM_SETTINGS + len(token.value)] = (
                sequence.request.temperature,
                sequence.request.top_p,
                0 if controls is None else controls.top_k or 0,
                0 if controls is None else controls.min_p or 0,
                *(NEUTRAL if controls is None else settings_of(controls)),
                *token.value,
            )
            records["adapter_slot"][place] = sequence.adapter_slot
            pages[place] = sequence.cache.pages[0]
            pages[place, : len(sequence.cache.pages)] = sequence.cache.pages
            self._flags[row] = self._flags_of(sequence)
        rows[count:], host["records"][count:] = rows[count - 1], host["records"][count - 1]

    def _flags_of(self, sequence: TokenSequence) -> int:
        kinds = self._value_kinds(sequence.request.parser.grammar) << _NUM_FLAGS
        is_random, is_controlled = sequence.request.temperature > 0, sequence.request.controls is not None
        return (
            kinds
            | _IS_RANDOM * is_random
            | _IS_CONTROLLED * is_controlled
            | _WITH_LOGPROBS * (sequence.request.num_logprobs is not None)
            | _IS_RESTRICTED * (sequence.request.matcher is not None)
            | _USES_ADAPTERS * (sequence.adapter_slot != 0)
        )

    def _columns(self, name: LiteralString, dtype: torch.dtype, count: int) -> Tensor:
        """Returns a field of the table's rows: [rows, count]."""
        assert self._record.fields is not None, "made with fields"
        first = self._record.fields[name][1] // dtype.itemsize
        return self._table.view(dtype)[:, first : first + count]

    def _open_layout(self, count: int) -> PackedLayout:
        return PackedLayout({"rows": ("int64", (count,)), "records": ("int64", (count, self._row_words))})

    def close(self, sequence: TokenSequence) -> None:
        """Frees the sequence's row, if it has one."""
        row = self._row_of.pop(sequence.id, None)
        if row is not None:
            self._free.append(row)

    def row(self, sequence: TokenSequence) -> int:
        """Returns the row of a sequence that has one."""
        return self._row_of[sequence.id]

    def needs(self, sequences: Iterable[TokenSequence]) -> RowNeeds:
        """Returns the features that any of the sequences needs, as of the time when each got its row."""
        flags, row_of, found = self._flags, self._row_of, 0
        for sequence in sequences:  # in every step, for every sequence
            found |= flags[row_of[sequence.id]]
        sampling = SampleNeeds(
            bool(found & _IS_RANDOM),
            found >> _NUM_FLAGS,
            bool(found & _IS_CONTROLLED),
            bool(found & _WITH_LOGPROBS),
            bool(found & _IS_RESTRICTED),
        )
        return RowNeeds(sampling, bool(found & _USES_ADAPTERS))

    def rows(self, sequences: Iterable[TokenSequence]) -> list[int]:
        """Returns the rows of sequences that have one."""
        row_of = self._row_of
        return [row_of[sequence.id] for sequence in sequences]

    def read(self, rows: Tensor) -> RowState:
        """Returns the integer columns of rows int64 [B]."""
        return RowState(*self._integers[rows].unbind(1))

    def draw_settings(self, rows: Tensor) -> DrawSettings:
        """Returns the settings by which tokens are drawn, of rows int64 [B]."""
        return DrawSettings(*self._floats[rows, :_NUM_DRAW_SETTINGS].unbind(1))

    def adjustment_settings(self, rows: Tensor) -> AdjustmentSettings:
        """Returns the settings that adjust logits, of rows int64 [B]."""
        return AdjustmentSettings(*self._floats[rows, _NUM_DRAW_SETTINGS:_NUM_SETTINGS].unbind(1))

    def values(self, rows: Tensor) -> Tensor:
        """Returns the values of the last tokens of rows int64 [B]: float32 [B, V]."""
        return self._floats[rows, _NUM_SETTINGS:]

    def add_pages(self, rows: Tensor, positions: Tensor, pages: Tensor, page_size: int) -> None:
        """Writes pages int32 [B] to where positions int64 [B], -1 for padding, need them; rows: int64 [B]."""
        self.page_table[rows, positions.clamp(min=0) // page_size] = pages

    @property
    def sampled_columns(self) -> tuple[Tensor, Tensor]:
        """The columns that a sample changes, of all rows: those of `RowState`, and the values of the last token."""
        return self._integers, self._floats[:, _NUM_SETTINGS:]
