"""Logging, set up once at start. Each call writes one line, through the logger `kestrel_grpc.calls`."""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def set_up_logging(level: str) -> None:
    """Write lines of `level` and above to standard error."""
    logging.basicConfig(level=level.upper(), format=_FORMAT, stream=sys.stderr)
