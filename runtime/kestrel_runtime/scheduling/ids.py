"""Identifiers that scheduling, execution and the engine share."""

from __future__ import annotations

from typing import NewType

StepId = NewType("StepId", int)
"""Counts the steps that an engine has launched. Ids rise and are never used again."""
