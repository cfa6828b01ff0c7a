"""Identifiers that scheduling, execution and the engine share."""

from __future__ import annotations

from typing import NewType, TypeAlias

PageId: TypeAlias = int
"""Index of a page of the KV cache."""
SequenceId: TypeAlias = int
"""Unique among the sequences of an engine."""
EntryId: TypeAlias = int
"""Index of an entry of the image embeddings on the device."""
StepId = NewType("StepId", int)
"""Number of a launched step of an engine. Ids rise and are never reused."""
