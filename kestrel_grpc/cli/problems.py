"""How commands report what is wrong: one line each on standard error."""

from __future__ import annotations

import sys

from kestrel_grpc.config.options import ConfigurationError


def complain(text: str) -> None:
    """Print one line."""
    print(f"kestrel-grpc: {text}", file=sys.stderr)


def refuse(error: ConfigurationError) -> int:
    """Print a line for each problem; returns the exit status."""
    for problem in error.problems:
        complain(problem)
    return 2
