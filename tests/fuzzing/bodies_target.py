"""A server over an engine without a model, with an HTTP port, until its standard input ends."""

from __future__ import annotations

import asyncio
import logging
import sys

import uvloop

from tests.server.http_calls import serving_http


async def main() -> None:
    """Serve."""
    logging.basicConfig(level=logging.ERROR)
    async with serving_http():
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
