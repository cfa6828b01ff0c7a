"""`bench.known_image` in small: requests find their image, and the model has no part in what is measured."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json
from bench.known_image import engine_costs, server_costs
print(json.dumps([*engine_costs(20, 4, 1), *server_costs(0.3, 4, 1)]))
"""


def test_costs_of_engine_and_server_are_measured():
    # In a process of its own: it replaces the launching of steps.
    run = subprocess.run((sys.executable, "-c", PROGRAM), capture_output=True, text=True, timeout=120, check=True)
    engine, server = json.loads(run.stdout)
    assert 0 < engine["event loop"] < engine["all"]
    assert 0 < server["event loop"] < server["all"]
    assert server["requests/s"] > 0
