"""Prepares text for a terminal, and opens standard streams that are closed."""

from __future__ import annotations

import contextlib
import os
import re
import sys

_STANDARD_INPUT = 0
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Returns the text with escapes such as `\\x1b` for control characters, except line feeds and tabs.

    Names and answers of others may hold control characters, marks that reverse the direction of what follows, and
    halves of surrogate pairs.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_json(document: str) -> str:
    """Returns the JSON with escapes such as `\\u009b` in its texts for control characters."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def print_error(text: str) -> None:
    """Prints one line on standard error. Does nothing if that cannot be written."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"kestrel-grpc: {printable(text)}", file=sys.stderr)


def open_standard_streams() -> None:
    """Opens standard input, output and error if they are closed, so that nothing is read from or written to them.

    Otherwise the next file or socket would get the number of a closed one, and the output that libraries print to
    it.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            mode = "r" if descriptor == _STANDARD_INPUT else "w"
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
