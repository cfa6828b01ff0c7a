"""The version of the client: that of the distribution, and what it tells servers."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
