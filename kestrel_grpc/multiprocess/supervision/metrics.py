"""Joins the metrics of several processes in one Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable


def joined(parts: Iterable[tuple[str, str, bytes]]) -> bytes:
    """Returns the texts of all processes as one.

    Each part is a label, its value, and the text of a process; every sample of the text gets that label.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    """The comments and the samples of each metric, by the name in its comments."""
    for label, value, text in parts:
        samples: list[str] = []
        comments: list[str] = []
        is_new = False
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in families
                comments, samples = families.setdefault(name, ([], []))
            if line.startswith("#"):
                if is_new:
                    comments.append(line)
            elif line:
                samples.append(_labelled(line, f'{label}="{value}"'))
    lines = (line for comments, samples in families.values() for line in (*comments, *samples))
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(sample: str, label: str) -> str:
    """Returns a sample, such as `name{a="b"} 1` or `name 1`, with one more label."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, number = sample.partition(" ")
    return f"{name}{{{label}}} {number}"
