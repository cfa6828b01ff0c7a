"""Identifiers that scheduling, execution and the engine share."""

from __future__ import annotations

from typing import NewType, TypeAlias

PageId: TypeAlias = int
"""Index of a page of the KV cache."""
SequenceId: TypeAlias = int
"""Unique among the sequences of an engine."""
StepId = NewType("StepId", int)
"""Counts the steps that an engine has launched. Ids rise and are never used again."""
