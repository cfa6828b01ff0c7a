"""Generates the blocking client of kestrel_client from the asyncio client: `client` from `aio`, its calls likewise.

Run `python -m tools.blocking_client` after every change of `aio.py` or `async_calls.py`. A test compares the files.
"""

import subprocess
import sys

from tools.source import CHECKOUT

# Not imported: a stale blocking client may keep the package from being imported.
PACKAGE = CHECKOUT / "clients/python/kestrel_client"
SOURCES = {"client.py": "aio.py", "blocking_calls.py": "async_calls.py", "blocking_frames.py": "async_frames.py"}
# Each of these texts must be in a source; what they become is in the generated module.
REPLACED = {
    "Provides the asyncio client, which has": "Provides the blocking client, which has",
    "`client` is generated from this file: after a change run `python -m tools.blocking_client`.": (
        "Generated from `aio.py` by tools/blocking_client.py. Change that file, and generate this one."
    ),
    "`blocking_calls` is generated from this file: after a change run `python -m tools.blocking_client`.": (
        "Generated from `async_calls.py` by tools/blocking_client.py. Change that file, and generate this one."
    ),
    "`blocking_frames` is generated from this file: after a change run `python -m tools.blocking_client`.": (
        "Generated from `async_frames.py` by tools/blocking_client.py. Change that file, and generate this one."
    ),
    "Sends the frames of the asyncio client": "Sends the frames of the blocking client",
    "in each. `aio` says": "in each. `client` says",
    "from kestrel_client.async_frames import": "from kestrel_client.blocking_frames import",
    "Iterable[ImageInput] | AsyncIterable[ImageInput]": "Iterable[ImageInput]",
    "AsyncFrameStream": "FrameStream",
    "AsyncIterable, ": "",
    "async with self._taking": "with self._taking",
    "`async_calls` sends them": "`blocking_calls` sends them",
    "of the asyncio client and reads the responses. `aio` says": (
        "of the blocking client and reads the responses. `client` says"
    ),
    "which the asyncio client awaits or reads": "or its response if the request has one",
    "from kestrel_client.async_calls import": "from kestrel_client.blocking_calls import",
    "from the event loop it was made in.": "from any thread.",
    "The call begins with the first piece asked for. Cancelling it": "Cancelling it",
    "`async with`": "`with`",
    "        # Reading starts the call.\n": "        self._start()\n",
    "StopAsyncIteration": "StopIteration",
    "AsyncCalls": "BlockingCalls",
    "AsyncTextStream": "TextStream",
    "AsyncSegmentStream": "SegmentStream",
    "AsyncPointStream": "PointStream",
    "AsyncDetectStream": "DetectStream",
    "AsyncStream": "Stream",
    "AsyncClient": "Client",
    "AsyncGenerator[Outcome, None]": "Generator[Outcome, None, None]",
    "AsyncGenerator": "Generator",
    "AsyncIterator": "Iterator",
    "Asyncio": "Threads",
    "async_map": "blocking_map",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "async def ": "def ",
    "await ": "",
}


def generated() -> dict[str, str]:
    """Returns the texts of the generated modules by their names."""
    texts = {name: (PACKAGE / source).read_text(encoding="utf-8") for name, source in SOURCES.items()}
    for asynchronous, blocking in REPLACED.items():
        if not any(asynchronous in text for text in texts.values()):
            raise ValueError(f"no source has {asynchronous!r} any more; change this script")
        texts = {name: text.replace(asynchronous, blocking) for name, text in texts.items()}
    return {name: _formatted(name, text) for name, text in texts.items()}


def _formatted(name: str, text: str) -> str:
    # Without `await` some statements fit one line. Formatting also orders the imports.
    for command in (["check", "--select", "I", "--fix"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", f"--stdin-filename={PACKAGE / name}", "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    for name, text in generated().items():
        (PACKAGE / name).write_text(text, encoding="utf-8")
