"""`bench.known_image` in small: requests find their image, and the model has no part in what is measured."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json
from bench.known_image import engine_costs, server_costs
rows = [*engine_costs(20, 4, 1)]
for workload in ("cached", "cached-whole"):
    rows += server_costs(workload, 0.3, 4, 1)
print(json.dumps(rows))
"""


def test_costs_of_engine_and_server_are_measured():
    # In a process of its own: it replaces the launching of steps.
    run = subprocess.run((sys.executable, "-c", PROGRAM), capture_output=True, text=True, timeout=120, check=True)
    engine, *servers = json.loads(run.stdout)
    assert 0 < engine["event loop"] < engine["all"]
    assert len(servers) == 2
    for server in servers:
        assert 0 < server["event loop"] < server["all"]
        assert server["requests/s"] > 0
