"""A server over an engine without a model, with an HTTP port, until its standard input ends."""

import asyncio
import logging
import sys

import uvloop

from tests.server.http_calls import serving_http

# So little that images leave for others all the time.
_STORE_BYTES = 4 * 2**20


async def main() -> None:
    """Serve."""
    logging.basicConfig(level=logging.ERROR)
    async with serving_http(max_stored_image_bytes=_STORE_BYTES, image_quota_bytes=_STORE_BYTES):
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
