"""Writes kestrel_client/client.py, the blocking client, from kestrel_client/aio.py, the asyncio client.

Run `python -m tests.client.generate` after every change of `aio.py`. A test compares the two files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kestrel_client

PACKAGE = Path(kestrel_client.__file__).parent
# Each of these texts must be in `aio.py`; what they become is in `client.py`.
REPLACED = {
    "The asyncio client: one method for each request.": "The blocking client: one method for each.",
    "`client` is generated from this file: after a change run `python -m tests.client.generate`.": (
        "Generated from `aio.py` by tests/client/generate.py. Change that file, and generate this one."
    ),
    "`async_calls` sends them": "`blocking_calls` sends them",
    "from kestrel_client.async_calls import AsyncCalls": "from kestrel_client.blocking_calls import BlockingCalls",
    "from the event loop it was made in.": "from any thread.",
    "AsyncCalls(": "BlockingCalls(",
    "AsyncTextStream": "TextStream",
    "AsyncSegmentStream": "SegmentStream",
    "AsyncClient": "Client",
    "AsyncGenerator[Outcome, None]": "Generator[Outcome, None, None]",
    "AsyncGenerator": "Generator",
    "async_map": "blocking_map",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "async def ": "def ",
    "await ": "",
}


def blocking_client() -> str:
    """The text of `client.py`."""
    text = (PACKAGE / "aio.py").read_text(encoding="utf-8")
    for asynchronous, blocking in REPLACED.items():
        if asynchronous not in text:
            raise ValueError(f"aio.py has no {asynchronous!r} any more; change this script")
        text = text.replace(asynchronous, blocking)
    # Without `await` some statements fit one line. Formatting also orders the imports.
    for command in (["check", "--select", "I", "--fix"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", f"--stdin-filename={PACKAGE / 'client.py'}", "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    (PACKAGE / "client.py").write_text(blocking_client(), encoding="utf-8")
