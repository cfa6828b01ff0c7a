"""A server of several processes: what its callers see, and what happens when one of the processes dies."""

import errno
import os
import select
import signal
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kestrel_client import Client, EngineStatus
from kestrel_client.v1 import engine_service_pb2, vision_service_pb2
from kestrel_client.v1.engine_service_pb2_grpc import EngineServiceStub
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.access.token_file import Scope, line_for
from kestrel_grpc.process.free_ports import PortUnavailable, reserved_port
from tests import warm
from tests.server.multiprocess.supervision.host_process import (
    MAX_WAIT_S,
    HostProcess,
    host_process,
    samples_by_process,
)

pytestmark = pytest.mark.usefixtures("warm_starts")
QUESTION = vision_service_pb2.CompleteQueryRequest(question="What is this?", sampling={"max_tokens": 4})
NUM_CONNECTIONS = 24
"""Linux gives each to one of two front ends: that one gets none has a chance of one in 8 million."""


@pytest.fixture(scope="module")
def host() -> Iterator[HostProcess]:
    """Two front ends and two engines. Tests may kill processes other than the supervisor, and wait for new ones."""
    with host_process("--frontends", "2", "--devices", "cpu,cpu", "--http-port", "0") as host:
        assert host.address
        yield host
        assert host.end() == 0
        assert host.complaints == []


def channel(address: str) -> grpc.Channel:
    """A connection of its own."""
    return grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),))


def ask_over_connections(address: str) -> None:
    for _ in range(NUM_CONNECTIONS):
        with channel(address) as one:
            VisionServiceStub(one).CompleteQuery(QUESTION, timeout=MAX_WAIT_S, wait_for_ready=True)


def has_ended(pid: int) -> bool:
    """Whether a process that is no child of ours ends in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(descriptor):
        return bool(select.select([descriptor], [], [], MAX_WAIT_S)[0])


def test_each_process_says_in_ps_what_it_is(host: HostProcess) -> None:
    assert host.processes().keys() == {
        "kestrel-grpc supervisor",
        *("kestrel-grpc core 0", "kestrel-grpc core 1"),
        *("kestrel-grpc frontend 0", "kestrel-grpc frontend 1"),
    }


def test_all_processes_are_one_server_to_callers_and_in_the_metrics(host: HostProcess) -> None:
    name = "rpc_server_call_duration_seconds"
    before = sum(samples_by_process(host.metrics()[name], "_count").values())
    ask_over_connections(host.address)
    metrics = host.metrics()
    calls = samples_by_process(metrics[name], "_count")
    assert calls.keys() == {"frontend-0", "frontend-1"}
    assert all(calls.values()), "each front end has had calls"
    assert sum(calls.values()) - before == NUM_CONNECTIONS
    assert samples_by_process(metrics["kestrel_kv_cache_capacity"]).keys() == {"engine-0", "engine-1"}
    assert samples_by_process(metrics["kestrel_engine_ready"]) == {"engine-0": 1, "engine-1": 1}
    assert samples_by_process(metrics["process_cpu_seconds"]).keys() == {
        *("supervisor", "frontend-0", "frontend-1", "engine-0", "engine-1")
    }
    series = [(sample.name, tuple(sample.labels.items())) for item in metrics.values() for sample in item.samples]
    assert len(series) == len(set(series))
    instances: set[str] = set()
    for _ in range(NUM_CONNECTIONS):
        with channel(host.address) as one:
            request = engine_service_pb2.GetServerInfoRequest()
            instances.add(EngineServiceStub(one).GetServerInfo(request, timeout=MAX_WAIT_S).instance_id)
    assert len(instances) == 1


def test_the_load_and_the_server_info_show_each_engine_and_each_front_end(host: HostProcess) -> None:
    processes = host.processes()
    with Client(host.address) as client:
        info, load = client.server_info(), client.load()
    assert [(engine.index, engine.device, engine.status) for engine in load.engines] == [
        *((0, "cpu", EngineStatus.SERVING), (1, "cpu", EngineStatus.SERVING))
    ]
    assert [engine.process_id for engine in load.engines] == [
        *(processes["kestrel-grpc core 0"], processes["kestrel-grpc core 1"])
    ]
    assert sum(engine.load.page_count for engine in load.engines if engine.load is not None) == load.page_count > 0
    assert [(one.name, one.process_id) for one in load.frontends] == [
        ("frontend-0", processes["kestrel-grpc frontend 0"]),
        ("frontend-1", processes["kestrel-grpc frontend 1"]),
    ]
    assert (len(info.engines), info.frontend_count) == (2, 2)
    assert sum(engine.max_running_requests for engine in info.engines) == info.limits.max_running_requests
    assert all(engine.memory_plan is not None for engine in info.engines)


def test_the_http_port_serves_the_probes_and_the_metrics_of_all_processes(host: HostProcess) -> None:
    for _ in range(NUM_CONNECTIONS):
        with urllib.request.urlopen(f"http://{host.http_address}/metrics", timeout=MAX_WAIT_S) as answer:
            text = answer.read().decode()
        assert 'process="frontend-0"' in text
        assert 'process="frontend-1"' in text
        assert 'kestrel_engine_ready{engine="1"} 1.0' in text
    for base in (f"http://{host.http_address}", host.machine_address):
        for path in ("/healthz", "/readyz", "/livez"):
            with urllib.request.urlopen(base + path, timeout=MAX_WAIT_S) as answer:
                assert answer.status == 200
    for headers in ({"Origin": "http://localhost"}, {"Host": "evil.example"}):
        page = urllib.request.Request(f"{host.machine_address}/metrics", headers=headers)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(page, timeout=MAX_WAIT_S)


def test_connections_to_the_port_of_the_metrics_leave_no_memory_behind(host: HostProcess) -> None:
    def memory_bytes() -> float:
        return samples_by_process(host.metrics()["process_resident_memory_bytes"])["supervisor"]

    def connect(times: int) -> None:
        for _ in range(times):
            host.get("/livez")

    connect(100)  # until what is kept for later is there
    before = memory_bytes()
    connect(400)
    assert memory_bytes() - before < 1.5 * 2**20  # less than 4 KiB each


def test_each_line_of_the_log_names_its_process(host: HostProcess) -> None:
    ask_over_connections(host.address)
    host.metrics()
    assert {line["process"] for line in host.lines} == {
        *("supervisor", "core-0", "core-1", "frontend-0", "frontend-1")
    }
    callers = {line["process"] for line in host.lines if line["logger"] == "kestrel_grpc.calls"}
    assert callers == {"frontend-0", "frontend-1"}


def test_a_front_end_that_is_killed_is_started_again_while_the_other_serves(host: HostProcess) -> None:
    old = host.kill("kestrel-grpc frontend 1")
    with Client(host.address) as client:  # whatever front end it had reached
        assert client.complete_query(None, "What is this?").answer
    host.wait_for("frontend-1.2 is ready")
    assert host.processes()["kestrel-grpc frontend 1"] != old
    ask_over_connections(host.address)
    metrics = host.metrics()
    assert all(samples_by_process(metrics["rpc_server_call_duration_seconds"], "_count").values())
    restarts = {item.labels["child"]: item.value for item in metrics["kestrel_process_restarts"].samples}
    assert restarts["frontend-1"] == 1
    assert restarts["frontend-0"] == 0


def test_a_core_that_is_killed_is_started_again_while_the_other_serves(host: HostProcess) -> None:
    host.kill("kestrel-grpc core 0")
    assert "it is started again in 1 s" in host.wait_for("core-0 has ended with SIGKILL")["message"]
    assert samples_by_process(host.metrics()["kestrel_engine_ready"]) == {"engine-0": 0, "engine-1": 1}
    with Client(host.address) as client:
        for _ in range(8):
            assert client.complete_query(None, "What is this?").answer
    assert host.get("/readyz") == "ok\n"
    host.wait_for("core-0.2 is ready")
    assert samples_by_process(host.metrics()["kestrel_engine_ready"]) == {"engine-0": 1, "engine-1": 1}
    ask_over_connections(host.address)


def test_a_front_end_starts_while_a_core_does(host: HostProcess) -> None:
    host.kill("kestrel-grpc core 1")
    host.wait_for("core-1 has ended")
    host.kill("kestrel-grpc frontend 0")
    host.wait_for("frontend-0.2 is ready")
    ask_over_connections(host.address)
    host.wait_for("core-1.2 is ready")
    told = [line["message"] for line in host.lines]
    assert told.index("frontend-0.2 is ready") < told.index("core-1.2 is ready")
    metrics = host.metrics()
    before = samples_by_process(metrics["kestrel_cache_lookups"])["engine-1"]
    ask_over_connections(host.address)
    assert samples_by_process(host.metrics()["kestrel_cache_lookups"])["engine-1"] > before


def test_no_request_is_blamed_where_a_core_is_killed_from_outside() -> None:
    with host_process("--frontends", "1") as host, channel(host.address) as one:
        request = vision_service_pb2.QueryRequest(question="What is this?", sampling={"max_tokens": 200})
        for generation in (2, 3):
            stream = VisionServiceStub(one).Query(request, timeout=MAX_WAIT_S)
            assert next(stream).HasField("started")
            host.kill("kestrel-grpc core 0")
            with pytest.raises(grpc.RpcError) as caught:
                list(stream)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            host.wait_for(f"core-0.{generation} is ready")
            with Client(host.address) as client:  # waits until the front end has connected
                client.complete_query(None, "Are you there?")
        assert list(VisionServiceStub(one).Query(request, timeout=MAX_WAIT_S))[-1].HasField("completed")
        assert host.end() == 0


def test_another_server_gets_none_of_its_ports(host: HostProcess) -> None:
    name, _, port = host.address.partition(":")
    with pytest.raises(PortUnavailable, match="in use"):
        reserved_port(name, int(port))


def test_sigterm_lets_running_calls_finish_even_if_every_process_gets_it() -> None:
    options = ("--frontends", "1")
    with warm.as_usual(), host_process(*options, in_own_group=True) as host, channel(host.address) as one:
        assert host.processes().keys() == {
            *("kestrel-grpc supervisor", "kestrel-grpc core 0", "kestrel-grpc frontend 0")
        }
        request = vision_service_pb2.QueryRequest(question="What is this?", sampling={"max_tokens": 200})
        stream = VisionServiceStub(one).Query(request, timeout=MAX_WAIT_S)
        assert next(stream).HasField("started")
        pids = host.processes().values()
        os.killpg(host.process.pid, signal.SIGTERM)
        assert list(stream)[-1].HasField("completed")
        assert host.wait() == 0
        assert all(has_ended(pid) for pid in pids)


def test_sigterm_withdraws_and_a_second_one_ends_all() -> None:
    with host_process("--frontends", "2", "--withdrawal-delay", "3600") as host:
        pids = host.processes() if host.address else {}
        assert host.get("/readyz") == "ok\n"
        host.process.terminate()
        host.wait_for("withdrawing")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            host.get("/readyz")
        with channel(host.address) as one:  # our client would go by the health that is reported
            assert VisionServiceStub(one).CompleteQuery(QUESTION, timeout=MAX_WAIT_S).result.answer
        assert host.end() == 0
        assert all(has_ended(pid) for pid in pids.values())


def test_the_lame_duck_period_ends_with_the_last_core() -> None:
    with host_process("--frontends", "1", "--withdrawal-delay", "3600") as host:
        assert host.address
        host.process.terminate()
        host.wait_for("withdrawing")
        host.kill("kestrel-grpc core 0")
        host.wait_for("draining")
        assert host.wait() == 0


@pytest.fixture
def runtime_folder() -> Iterator[Path]:
    """For the private folders of servers. The path of `tmp_path` is too long for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def test_a_supervisor_that_is_killed_leaves_no_process_and_the_next_one_removes_its_folder(
    runtime_folder: Path,
) -> None:
    program = f"import os; os.environ['TMPDIR'] = {str(runtime_folder)!r}"
    with host_process("--frontends", "1", program=program) as host, channel(host.address) as one:
        request = vision_service_pb2.QueryRequest(question="What is this?", sampling={"max_tokens": 200})
        stream = VisionServiceStub(one).Query(request, timeout=MAX_WAIT_S)
        assert next(stream).HasField("started")
        pids = host.processes().values()
        (folder,) = runtime_folder.glob("kestrel-grpc-*")
        assert folder.stat().st_mode & 0o777 == 0o700
        host.kill("kestrel-grpc supervisor")
        assert list(stream)[-1].HasField("completed")
        assert all(has_ended(pid) for pid in pids)
        assert folder.exists()
    with host_process("--frontends", "1", "--model", "/nowhere", program=program) as host:
        assert host.wait() == 1
        assert list(runtime_folder.iterdir()) == []


def test_a_core_that_cannot_load_ends_the_start_with_its_reason() -> None:
    with host_process("--frontends", "1", "--model", "/nowhere") as host:
        assert host.wait() == 1
        assert host.complaints == []  # in JSON this is a line of the log
        reasons = [line for line in host.lines if "/nowhere" in line["message"]]
        assert [(line["level"], line["process"]) for line in reasons] == [("error", "core-0")]
        assert "the server has ended" in host.lines[-1]["message"]
        assert host.wait_for("core-0 has ended with status 1 before it was ready")


SHORT_PINGS = """
from pathlib import Path
from kestrel_grpc.multiprocess.supervision import supervisor

supervisor.PING_INTERVAL_S = 0.1
ask = supervisor.Link.ask

async def ask_shortly(link, question, *, timeout_s):
    is_stopped = Path({folder!r}, link.name)
    if isinstance(question, supervisor.messages.Ping) and is_stopped.exists():
        is_stopped.unlink()
        timeout_s = 0.5
    return await ask(link, question, timeout_s=timeout_s)

supervisor.Link.ask = ask_shortly
"""
"""The supervisor waits as long as usual for a process that runs, however slowly, and shortly for one whose name is
that of a file in a folder."""


def test_a_process_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    with host_process("--frontends", "1", program=SHORT_PINGS.format(folder=str(tmp_path))) as host:
        assert host.address
        for title in ("frontend", "core"):
            os.kill(host.processes()[f"kestrel-grpc {title} 0"], signal.SIGSTOP)
            (tmp_path / f"{title}-0").touch()
            host.wait_for(f"{title}-0 has not answered Ping within")
            host.wait_for(f"{title}-0.2 is ready")
        with Client(host.address, timeout_s=MAX_WAIT_S, wait_for_ready=True) as client:
            assert client.complete_query(None, "What is this?").answer
        assert host.end() == 0


REFUSED_STARTS = """
import errno, os, subprocess
from pathlib import Path
from kestrel_grpc.multiprocess.supervision import supervisor

start = supervisor.subprocess.Popen

def refuse(command, **options):
    left = Path({folder!r}, command[3])
    if left.exists() and (number := int(left.read_text())):
        left.write_text(str(number - 1))
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return start(command, **options)

supervisor.subprocess.Popen = refuse
"""
"""Starts of front ends and of cores are refused as often as a file of that name in a folder says."""


def test_a_process_that_cannot_be_started_again_is_tried_until_it_can(tmp_path: Path) -> None:
    with host_process("--frontends", "1", program=REFUSED_STARTS.format(folder=str(tmp_path))) as host:
        assert host.address
        assert host.get("/readyz") == "ok\n"
        for title in ("core", "frontend"):
            (tmp_path / title).write_text("1")
            host.kill(f"kestrel-grpc {title} 0")
            line = host.wait_for(
                f"{title}-0 cannot be started: {os.strerror(errno.EAGAIN)}; it is started again in"
            )
            assert line["level"] == "error"
            with pytest.raises(urllib.error.HTTPError, match="503"):
                host.get("/readyz")
            host.wait_for(f"{title}-0.3 is ready")
        with Client(host.address, timeout_s=MAX_WAIT_S, wait_for_ready=True) as client:
            assert client.complete_query(None, "What is this?").answer
        assert host.get("/readyz") == "ok\n"
        assert host.end() == 0


def test_sighup_to_every_process_ends_none_and_reads_tokens_again(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(line_for("alice", "one", frozenset(Scope)) + "\n")
    options = ("--frontends", "1", "--tokens", str(path))
    with warm.as_usual(), host_process(*options, in_own_group=True) as host, channel(host.address) as one:

        def outcome(secret: str) -> grpc.StatusCode:
            metadata = (("authorization", f"Bearer {secret}"),)
            return VisionServiceStub(one).CompleteQuery.future(QUESTION, MAX_WAIT_S, metadata).code()

        pids = host.processes()
        assert outcome("one") is grpc.StatusCode.OK
        # What looks like no change is read only because of the signal.
        before = path.stat()
        path.write_text(line_for("alice", "two", frozenset(Scope)) + "\n")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.killpg(host.process.pid, signal.SIGHUP)
        host.wait_for("reloaded ")
        assert (outcome("one"), outcome("two")) == (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK)
        path.write_text("a mistake")
        os.killpg(host.process.pid, signal.SIGHUP)
        host.wait_for("what was read before stays in force")
        assert outcome("two") is grpc.StatusCode.OK
        assert host.processes() == pids
        assert host.end() == 0


def test_a_process_that_would_run_other_code_ends_the_server_in_order() -> None:
    program = (
        "import kestrel_grpc.multiprocess.supervision.supervisor as supervisor\n"
        "ended = supervisor.Supervisor.frontend_ended\n"
        "def change(self, identity):\n"
        "    self.build = 'another'\n"
        "    ended(self, identity)\n"
        "supervisor.Supervisor.frontend_ended = change"
    )
    with host_process("--frontends", "2", program=program) as host, channel(host.address) as one:
        host.kill("kestrel-grpc frontend 0")
        host.wait_for("the installed package is another")
        request = vision_service_pb2.CompleteQueryRequest(question="What is this?", sampling={"max_tokens": 200})
        codes = {VisionServiceStub(one).CompleteQuery.future(request, timeout=MAX_WAIT_S).code() for _ in range(3)}
        assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
        assert host.wait() == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_supervisor_that_ends_while_a_core_loads_leaves_no_process(number: signal.Signals, status: int) -> None:
    with host_process("--frontends", "1") as host:
        host.wait_for("loaded moondream-nano")
        children = Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children").read_text().split()
        host.process.send_signal(number)
        assert host.wait() == status
        assert all(has_ended(int(pid)) for pid in children)


def test_one_device_by_its_number_needs_no_other_process() -> None:
    with host_process("--devices", "cpu") as host:
        assert host.address
        assert list(host.processes().values()) == [host.process.pid]
        assert host.end() == 0
