"""A replica that tells tests what happens in it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from deploy.ray.app import Kestrel, Replica

LOG = "KESTREL_TEST_RAY_CALLS"
"""The variable that names the file with a line for each call that has ended, of all replicas."""


class Probed(Replica):
    """Writes the log of calls to a file, and has its engine stopped as by a fault."""

    async def __init__(self, options: Mapping[str, str]) -> None:
        await super().__init__(options)
        calls = logging.getLogger("kestrel_grpc.calls")
        calls.setLevel(logging.INFO)
        calls.addHandler(logging.FileHandler(os.environ[LOG]))

    def stop_engine(self) -> None:
        """Calls fail from now on."""
        self._engine.close()


PROBED = Kestrel.options(func_or_class=Probed)


def calls_in(file: Path, request_id: str) -> list[str]:
    """The lines about a call."""
    return [line for line in file.read_text(encoding="utf-8").splitlines() if f"request_id={request_id} " in line]
