"""A Ray cluster of this machine alone, with the proxies of Serve on free ports, and what is asked of it."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import ray  # installed in an environment of its own
from ray import serve  # the same

from deploy.ray.app import Kestrel

APPLICATION = "kestrel"
DEPLOYMENT = "Kestrel"
OPTIONS: Mapping[str, str] = {
    "device": "cpu",
    "adapters": str(files("kestrel_runtime").joinpath("nano", "adapters")),
    "log_level": "warning",
}
"""The built-in model with its adapter."""
SERVICERS = ("deploy.ray.ingress.add_VisionService", "deploy.ray.ingress.add_EngineService")
MAX_WAIT_S = 300
"""Longer than any machine needs: a longer wait is a failure."""


@contextmanager
def cluster() -> Iterator[str]:
    """The address of the gRPC proxy. Replicas may be more than the processors."""
    grpc_port, http_port = _free_ports(2)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise Ray writes one into the home of the user.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray.init(
        address="local",  # also where another cluster runs on this machine
        num_cpus=16,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    try:
        serve.start(
            http_options={"host": "127.0.0.1", "port": http_port},
            grpc_options={"port": grpc_port, "grpc_servicer_functions": list(SERVICERS), "enable_reflection": True},
        )
        yield f"127.0.0.1:{grpc_port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(deployment: Any = Kestrel, options: Mapping[str, str] = OPTIONS, **settings: Any) -> None:
    """Deploy, or change what is deployed, and return when all replicas are new. `settings` are Ray's."""
    changed = deployment.options(ray_actor_options={"num_cpus": 1}, **settings)
    serve.run(changed.bind(dict(options)), name=APPLICATION, route_prefix="/kestrel")


def handle() -> Any:
    """Calls methods of a replica, whichever Ray selects."""
    return serve.get_app_handle(APPLICATION)


def num_running() -> int:
    """Replicas that take calls."""
    deployment = serve.status().applications[APPLICATION].deployments[DEPLOYMENT]
    return deployment.replica_states.get("RUNNING", 0)


def ray_version() -> str:
    """The version of Ray."""
    return ray.__version__


def wait_until(holds: Callable[[], object]) -> None:
    """Ask until it holds. Ray tells nobody when its state changes, so that it has to be asked."""
    until = time.monotonic() + MAX_WAIT_S
    while not holds():
        assert time.monotonic() < until, f"did not come to hold within {MAX_WAIT_S} s"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports
