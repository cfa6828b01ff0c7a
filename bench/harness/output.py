"""Writes what a bench has to say: its help, its results as JSON, numbers for people, and how far it has come."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

_WIDTH = 24


class Progress:
    """Counts steps of a run: one line that is rewritten on a terminal, and one line a step anywhere else."""

    def __init__(self, num_steps: int, stream: TextIO = sys.stderr) -> None:
        self._num_steps = num_steps
        self._stream = stream
        self._num_done = 0
        self._started = time.perf_counter()

    def begin(self, what: str) -> None:
        """A step begins."""
        self._show(what)

    def end(self, what: str) -> None:
        """It has ended."""
        self._num_done += 1
        self._show(what)

    def close(self) -> None:
        """No step follows."""
        if self._stream.isatty():
            self._stream.write("\n")

    def _show(self, what: str) -> None:
        filled = _WIDTH * self._num_done // max(self._num_steps, 1)
        bar = "█" * filled + "░" * (_WIDTH - filled)
        elapsed_s = time.perf_counter() - self._started
        line = f"{bar} {self._num_done}/{self._num_steps} {elapsed_s:4.0f} s  {what}"
        self._stream.write(f"\r\x1b[K{line}" if self._stream.isatty() else f"{line}\n")
        self._stream.flush()


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Returns a parser of arguments whose help has the docstring of a bench, line by line."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write a result, with the folders above it: a line for each entry, and for each row of a list of rows.

    Numbers have six significant digits, more than any measurement repeats.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    entries = (f"{json.dumps(name)}: {_json_rows(_rounded(value))}" for name, value in data.items())
    file.write_text("{\n" + ",\n".join(entries) + "\n}\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _json_rows(value: Any) -> str:
    if isinstance(value, list | tuple) and any(isinstance(row, Mapping | list | tuple) for row in value):
        return "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
    return json.dumps(value)
