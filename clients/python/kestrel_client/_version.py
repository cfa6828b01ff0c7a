"""Holds the version of the client, which the distribution has and which servers see in each call."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
