"""Every query of the dashboard, the alert rules and the autoscalers, put to a Prometheus that scraped a server."""

import asyncio
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import grpc
import pytest
import yaml

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_grpc.telemetry.metrics import METRICS, Kind
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.deploy.test_kubernetes import AUTOSCALER, SCALED_OBJECT, adapter_rules
from tests.reference_fixtures import CHECKOUT, MD3_SMALL, image_paths

PROMETHEUS = CHECKOUT / "deploy" / "prometheus"
DASHBOARD = json.loads((CHECKOUT / "deploy" / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
# What Grafana puts in before it asks.
FILLED_IN = {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*", "$operation": ".*"}
OF_SEVERAL_PROCESSES = "kestrel_process_restarts_total"

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool, from Debian's package prometheus",
)


def series() -> Iterator[str]:
    """The name of every series that the server offers, and that Prometheus makes of a scrape."""
    for metric in METRICS:
        if metric.kind is Kind.HISTOGRAM:
            yield from (f"{metric.prometheus_name}_{part}" for part in ("bucket", "sum", "count"))
        else:
            yield metric.prometheus_name + ("_total" if metric.kind is Kind.COUNTER else "")
    yield from ("up", "process_open_fds", "process_max_fds")


def panel_queries() -> dict[str, str]:
    """Queries as Grafana would send them, by panel and letter."""
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for variable, text in FILLED_IN.items():
                query = query.replace(variable, text)
            found[f"{panel['title']} {target['refId']}"] = query
    return found


def alert_queries() -> dict[str, str]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def without_threshold(query: str) -> str:
    """What an alert looks at, whether or not it is time to cry."""
    value, count = re.subn(r"\s(?:>|==)\s[\d.]+$", "", query)
    assert count == 1, query
    return value


def scaling_queries() -> list[str]:
    """What the autoscalers ask."""
    found = [item["metadata"]["query"] for item in SCALED_OBJECT["triggers"]]
    (rule,) = adapter_rules()
    for item in AUTOSCALER["metrics"]:
        query = rule["metricsQuery"].replace("<<.Series>>", item["pods"]["metric"]["name"])
        # In a cluster these are the namespace and the pod, labels that this Prometheus does not have.
        query = query.replace("<<.LabelMatchers>>", 'job="kestrel"').replace("<<.GroupBy>>", "instance")
        found.append(query)
    return found


class Scrapes:
    """Stands between Prometheus and the server, so that a test knows when it was scraped."""

    def __init__(self, port: int) -> None:
        self._begun = threading.Semaphore(0)
        begun = self._begun

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                begun.release()
                body = get(port, self.path, self.headers.get("Accept", ""))
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def wait(self) -> None:
        """Return when a scrape that began after this call has been stored."""
        while self._begun.acquire(blocking=False):
            pass
        for _ in range(3):  # one may be under way; one is stored before the next begins
            assert self._begun.acquire(timeout=60)


def get(port: int, path: str, accept: str = "") -> bytes:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers={"Accept": "text/plain;version=0.0.4"} if accept else {})
        return connection.getresponse().read()
    finally:
        connection.close()


@dataclass(frozen=True)
class Prometheus:
    """A running one."""

    port: int
    scrapes: Scrapes

    def query(self, text: str) -> list[Any]:
        answer = json.loads(get(self.port, f"/api/v1/query?{urlencode({'query': text})}"))
        assert answer["status"] == "success", (text, answer)
        return answer["data"]["result"]


@contextmanager
def prometheus(folder: Path, metrics_port: int) -> Iterator[Prometheus]:
    """One that scrapes five times a second under the job of our own configuration, with our own rules."""
    scrapes = Scrapes(metrics_port)
    threading.Thread(target=scrapes.server.serve_forever, args=(0.05,), daemon=True).start()
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / "alerts.yml")]
    (job,) = (job for job in config["scrape_configs"] if job["job_name"] == "kestrel")
    job["static_configs"] = [{"targets": [f"127.0.0.1:{scrapes.server.server_port}"]}]
    config["scrape_configs"] = [job]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = ("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
    with subprocess.Popen(
        (*command, "--web.listen-address=127.0.0.1:0"), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Prometheus(listening_port(process), scrapes)
        finally:
            process.kill()
            scrapes.server.shutdown()
            scrapes.server.server_close()


def listening_port(process: subprocess.Popen[str]) -> int:
    """Where it listens, once it is ready; then its log is read on, so that it never waits to write."""
    assert process.stderr is not None
    port = None
    for line in process.stderr:
        if found := re.search(r'msg="Listening on".* address=127\.0\.0\.1:(\d+)', line):
            port = int(found[1])
        if "Server is ready to receive web requests" in line and port is not None:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return port
    raise AssertionError("Prometheus ended early")


async def load(server: Server) -> None:
    """A bit of everything, some of which fails."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = VisionServiceStub(channel)
        image, short = {"data": image_paths(MD3_SMALL)[0].read_bytes()}, {"max_tokens": 8}
        impatient = {"max_queue_duration": {"nanos": 1}}
        calls = [
            *(stub.CompleteQuery(wire.CompleteQueryRequest(question=text, sampling=short)) for text in "abcdef"),
            stub.CompleteQuery(wire.CompleteQueryRequest(question="hi", image=image, sampling=short)),
            stub.Point(wire.PointRequest(object="x", image=image, max_objects=2)),
            stub.CompleteQuery(wire.CompleteQueryRequest(question="hi", options=impatient)),
            stub.CompleteQuery(wire.CompleteQueryRequest()),
        ]
        codes = await asyncio.gather(*(call.code() for call in calls))
        answered, invalid = {grpc.StatusCode.OK}, {grpc.StatusCode.INVALID_ARGUMENT}
        # A caller that may not wait is refused on arrival once the wait is known, and in the queue before that.
        too_late = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert set(codes) - too_late == answered | invalid
        assert set(codes) & too_late


async def answers(folder: Path) -> dict[str, list[Any]]:
    """What Prometheus answers to every question, by its text, while the server lives."""
    config = ServerConfig(
        port=0, metrics_port=0, engine=EngineConfig(str(MD3_SMALL), dtype="float32", device="cpu")
    )
    engine = LocalEngine(LoadedModel.load(config.engine_config()), config.engine_config())
    async with Server(engine, config) as server:
        assert server.metrics_port is not None
        with prometheus(folder, server.metrics_port) as running:
            for _ in range(2):  # a rate needs a sample from before
                await load(server)
                await asyncio.to_thread(running.scrapes.wait)
            alerts = alert_queries().values()
            texts = {*panel_queries().values(), *alerts, *map(without_threshold, alerts), *scaling_queries()}
            return {text: await asyncio.to_thread(running.query, text) for text in sorted(texts)}


@pytest.fixture(scope="module")
def answered(tmp_path_factory) -> dict[str, list[Any]]:
    return asyncio.run(answers(tmp_path_factory.mktemp("prometheus")))


@pytest.mark.parametrize("panel", panel_queries())
def test_every_query_of_the_dashboard_returns_numbers(answered, panel):
    if "kestrel_device_" in panel_queries()[panel]:
        pytest.skip("needs a GPU")
    if OF_SEVERAL_PROCESSES in panel_queries()[panel]:
        pytest.skip("needs several processes")
    values = [float(item["value"][1]) for item in answered[panel_queries()[panel]]]
    assert [value for value in values if value == value], "no data"


@pytest.mark.parametrize("alert", alert_queries())
def test_every_alert_runs_and_looks_at_numbers(answered, alert):
    query = alert_queries()[alert]
    assert query in answered
    if OF_SEVERAL_PROCESSES in query:
        pytest.skip("needs several processes")
    values = [float(item["value"][1]) for item in answered[without_threshold(query)]]
    assert [value for value in values if value == value], "no data"


@pytest.mark.parametrize("query", scaling_queries())
def test_every_query_of_an_autoscaler_returns_one_number(answered, query):
    (item,) = answered[query]
    assert float(item["value"][1]) >= 0


def test_every_variable_of_the_dashboard_asks_for_a_series_there_is():
    queries = [item["query"]["query"] for item in DASHBOARD["templating"]["list"] if item["type"] == "query"]
    found = [re.fullmatch(r"label_values\(([a-z_]+)(?:\{.*\})?, ([a-z_]+)\)", query) for query in queries]
    assert found
    assert all(match is not None and match[1] in set(series()) for match in found)


@pytest.mark.parametrize("check", [("config", "prometheus.yml"), ("rules", "alerts.yml")])
def test_prometheus_own_tool_finds_nothing_wrong(check):
    done = subprocess.run(
        ("promtool", "check", check[0], str(PROMETHEUS / check[1])), capture_output=True, text=True, check=False
    )
    assert (done.returncode, "FAILED" in done.stdout + done.stderr) == (0, False), done.stderr
