"""What do callers notice when a process of a server dies, hangs or finds other code on the disk?

Starts a server with front ends and engine cores of their own, and calls it over all APIs: our client with retries
and without, REST, OpenAI with a constraint, Triton, adapters, and images that are uploaded and asked about.
Questions are greedy, so that every answer is known. Then it does harm, many times, and checks after each time

- that each call had its known answer, or an error that the documentation names for such a fault;
- that no call through our client with retries failed, where another process of the kind lived;
- that no call took longer than a minute;
- that the server serves again with all its processes, and holds no page, request or request of an adapter.

`none`                  no harm: all answers are those of a server of one process
`frontend`, `core`      SIGKILL
`stopped`               SIGSTOP of a core for 30 seconds
`loading`               SIGKILL of a core, and of the process that comes after it while it loads
`descriptors`           a front end may open no more files
`supervisor`            SIGKILL: all processes must end, and the next server must start
`folder`                the folder of the sockets is removed, then a core is killed: the server ends with an error
`upgrade`               the code on the disk changes, then a front end is killed: likewise
`poison`                one of 64 requests at once ends the process of each core that runs it, with an exit in the
                        middle of a step; it alone is refused, as an equal one that comes later
`poison-killed`         the same by SIGKILL, as for want of memory

    python -m bench.process_faults --runs 20
    python -m bench.process_faults --only core,stopped --runs 3
"""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc

import kestrel_runtime
from bench.harness import poison
from bench.harness.checkpoints import write_random_adapters
from bench.harness.output import parser_of, write_json
from bench.harness.serving import machine_facts
from bench.harness.workload import chart
from kestrel_client import AsyncClient
from kestrel_client.errors import KestrelClientError
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as triton

_TREE = Path(__file__).resolve().parents[1]
_OPTIONS = (
    *("--port", "0", "--http-port", "0", "--metrics-port", "0", "--withdrawal-delay", "0", "--triton", "on"),
    *("--max-adapter-rank", "4", "--kv-pages", "1200", "--log-level", "warning"),
)
_TOO_LONG_S = 60.0
_RECOVERY_S = 90.0
_STOPPED_S = 30.0
_LOAD_BEFORE_S, _LOAD_AFTER_S = 1.0, 3.0
_NUM_BESIDE_POISON = 63
_FEW_QUESTIONS = 6
"""Of each kind, to servers that do not live long."""
_GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
_QUESTIONS = ("What is shown?", "How many bars are there?", "Which colour is the star?")
_ALLOWED_HTTP = {429, 499, 502, 503}
_ALLOWED_CODES = {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"}
"""A caller of a front end that died is told UNAVAILABLE by its own library; a stream may end with CANCELLED."""


@dataclass(slots=True)
class Tally:
    """What became of calls."""

    ends: Counter[str] = field(default_factory=Counter)
    complaints: Counter[str] = field(default_factory=Counter)

    def print_error(self, what: str) -> None:
        """Count something that must not happen."""
        self.complaints[what] += 1


class Server:
    """A server of several processes, as a child."""

    def __init__(
        self, tree: Path, options: Sequence[str], log: Path, program: str, environment: Mapping[str, str]
    ) -> None:
        sources = (tree, tree / "runtime", tree / "kernels", tree / "clients/python")
        paths = (*sources, os.environ.get("PYTHONPATH", ""))
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                (sys.executable, "-m", program, "serve", *_OPTIONS, *options),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=tree,
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            )
        self.log = log
        self.address = self._announced("kestrel-grpc serves")
        self.http_address = self._announced("HTTP is served")

    def children(self) -> dict[str, int]:
        """Process ids by title; empty once the supervisor has ended."""
        try:
            pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        except OSError:
            return {}
        return {title: int(pid) for pid in pids if (title := _title(int(pid)))}

    def chosen(self, kind: str, chance: random.Random) -> int:
        """One of the processes of a kind."""
        return chance.choice([pid for title, pid in sorted(self.children().items()) if kind in title])

    def folder(self) -> Path:
        """That of the sockets."""
        core = next(pid for title, pid in self.children().items() if "core" in title)
        descriptors = Path(f"/proc/{core}/fd").iterdir()
        sockets = {os.readlink(path) for path in descriptors if path.is_symlink()}
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            *_, inode, path = (*line.split(), "")[:8]
            if f"socket:[{inode}]" in sockets and path.endswith(".socket"):
                return Path(path).parent
        raise RuntimeError("a core has no socket")

    def _announced(self, text: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(text):
                return line.split(" on ")[1].split()[0]
        raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""


@contextmanager
def serving(
    options: Sequence[str],
    log: Path,
    tree: Path = _TREE,
    program: str = "kestrel_grpc",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Server]:
    """A server, killed with all its processes at the end. `program` is the module to run for `kestrel-grpc`."""
    server = Server(tree, options, log, program, environment)
    try:
        yield server
    finally:
        for pid in (*server.children().values(), server.process.pid):
            try:
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGTERM)
            except OSError:
                continue
        try:
            server.process.wait(60)
        except subprocess.TimeoutExpired:
            server.process.kill()


class Callers:
    """Calls of all kinds, whose answers are learned first."""

    def __init__(self, server: Server, adapter: str, num_questions: int = 24) -> None:
        """`num_questions` are drawn for each kind; some are equal."""
        self.tally = Tally()
        self._num_questions = num_questions
        self.must_not_fail = True
        """Whether calls with retries may fail."""
        self.wait_for_ready = False
        """Whether calls wait for a core to serve, if there is none."""
        self._server = server
        self._adapter = adapter
        self._pictures = [chart(number, 378, 378) for number in range(4)]
        self.known: dict[str, str] = {"stored gone": ""}
        """Answers by kind and question."""
        self._is_over = asyncio.Event()
        self._kinds: dict[str, Callable[[random.Random], Awaitable[tuple[str, str]]]] = {
            "client": self._complete_query,
            "client detect": self._detect,
            "client adapter": self._with_adapter,
            "stream": self._stream,
            "stored": self._stored,
            "rest": self._rest,
            "openai": self._openai,
            "triton": self._triton,
        }

    async def learn(self) -> None:
        """Ask everything once, before anything fails."""
        for name, ask in self._kinds.items():
            for seed in range(self._num_questions):
                key, answer = await ask(random.Random(seed))
                assert self.known.setdefault(f"{name} {key}", answer) == answer, f"{name} {key} answers differently"

    async def run(self, duration_s: float) -> None:
        """Keep two callers of each kind busy."""
        self._is_over.clear()
        end = time.monotonic() + duration_s
        await asyncio.gather(
            *(
                self._keep_asking(name, ask, random.Random(f"{name} {number}"), end)
                for name, ask in self._kinds.items()
                for number in range(2)
            )
        )

    async def _keep_asking(
        self,
        name: str,
        ask: Callable[[random.Random], Awaitable[tuple[str, str]]],
        chance: random.Random,
        end: float,
    ) -> None:
        while time.monotonic() < end:
            began = time.monotonic()
            if await self._ask(name, ask, chance) != "OK":
                await asyncio.sleep(max(0.0, 0.2 - (time.monotonic() - began)))

    async def _ask(
        self, name: str, ask: Callable[[random.Random], Awaitable[tuple[str, str]]], chance: random.Random
    ) -> str:
        """Ask one of the questions that `learn` has asked, and count how that ended; returns it."""
        try:
            async with asyncio.timeout(_TOO_LONG_S):
                key, answer = await ask(random.Random(chance.randrange(self._num_questions)))
            outcome = "OK"
            if self.known[f"{name} {key}"] != answer:
                self.tally.print_error(f"{name}: another answer")
        except TimeoutError:
            outcome = "hangs"
            self.tally.print_error(f"{name}: no end within {_TOO_LONG_S:g} s")
        except KestrelClientError as error:
            outcome = error.code.name
            if outcome not in _ALLOWED_CODES:
                self.tally.print_error(f"{name}: {outcome} {error.reason}")
            elif name.startswith("client") and self.must_not_fail:
                self.tally.print_error(f"{name}: failed with {outcome} {error.reason}")
        except grpc.RpcError as error:
            outcome = error.code().name
            if outcome not in _ALLOWED_CODES:
                self.tally.print_error(f"{name}: {outcome}")
        except urllib.error.HTTPError as error:
            outcome = str(error.code)
            if error.code not in _ALLOWED_HTTP:
                self.tally.print_error(f"{name}: {outcome}")
        except OSError as error:
            outcome = type(error).__name__
        self.tally.ends[f"{name} {outcome}"] += 1
        return outcome

    async def run_with_poison(self, num_others: int) -> None:
        """So many questions of all kinds, and a request that kills, at once."""
        kinds = itertools.islice(itertools.cycle(self._kinds.items()), num_others)
        others = [self._ask(name, ask, random.Random(number)) for number, (name, ask) in enumerate(kinds)]
        others.insert(num_others // 2, self.ask_for_death())
        await asyncio.gather(*others)

    async def ask_for_death(self) -> str:
        """A request that kills; returns its end, and complains where it is not refused."""
        try:
            async with self._client() as client:
                await client.complete_query(self._pictures[0], "Who are you?", seed=poison.SEED, **_GREEDY)
            outcome = "OK"
        except KestrelClientError as error:
            outcome = f"{error.code.name} {error.reason}"
        self.tally.ends[f"poison {outcome}"] += 1
        if outcome != "FAILED_PRECONDITION REQUEST_REFUSED":
            self.tally.print_error(f"poison: {outcome}")
        return outcome

    def _client(self, **options: Any) -> AsyncClient:
        options = {"wait_for_ready": self.wait_for_ready, **options}
        return AsyncClient(self._server.address, timeout_s=_TOO_LONG_S + 10, **options)

    def _drawn(self, chance: random.Random) -> tuple[int, str]:
        return chance.randrange(len(self._pictures)), chance.choice(_QUESTIONS)

    async def _complete_query(self, chance: random.Random) -> tuple[str, str]:
        number, question = self._drawn(chance)
        async with self._client() as client:
            result = await client.complete_query(self._pictures[number], question, **_GREEDY)
        return f"{number} {question}", result.answer

    async def _detect(self, chance: random.Random) -> tuple[str, str]:
        number, _ = self._drawn(chance)
        async with self._client() as client:
            result = await client.detect(self._pictures[number], "bar", max_objects=3)
        return str(number), str(result.objects)

    async def _with_adapter(self, chance: random.Random) -> tuple[str, str]:
        number, question = self._drawn(chance)
        async with self._client() as client:
            result = await client.complete_query(self._pictures[number], question, adapter=self._adapter, **_GREEDY)
        return f"{number} {question}", result.answer

    async def _stream(self, chance: random.Random) -> tuple[str, str]:
        number, question = self._drawn(chance)
        async with self._client(max_retries=0, max_retry_s=0) as client:
            stream = client.query(self._pictures[number], question, **_GREEDY)
            return f"{number} {question}", "".join([piece async for piece in stream])

    async def _stored(self, chance: random.Random) -> tuple[str, str]:
        number, question = self._drawn(chance)
        async with self._client(max_retries=0, max_retry_s=0) as client:
            try:
                stored = await client.upload_image(self._pictures[number], ttl_s=5)
                result = await client.complete_query(stored, question, **_GREEDY)
            except KestrelClientError as error:
                if error.reason == "IMAGE_NOT_FOUND":  # another caller's upload of the same image has run out
                    return "gone", ""
                raise
        return f"{number} {question}", result.answer

    async def _rest(self, chance: random.Random) -> tuple[str, str]:
        number, question = self._drawn(chance)
        image = base64.b64encode(self._pictures[number]).decode()
        body = {"question": question, "image_url": f"data:image/png;base64,{image}", "settings": _GREEDY}
        found = await asyncio.to_thread(self._post, "/v1/query", body)
        return f"{number} {question}", found["answer"]

    async def _openai(self, chance: random.Random) -> tuple[str, str]:
        number, question = self._drawn(chance)
        image = base64.b64encode(self._pictures[number]).decode()
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        body = {
            "model": "moondream-nano",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
                        {"type": "text", "text": question},
                    ],
                }
            ],
            "temperature": 0,
            "max_tokens": 12,
            "response_format": {"type": "json_schema", "json_schema": {"name": "count", "schema": schema}},
        }
        found = await asyncio.to_thread(self._post, "/v1/chat/completions", body)
        return f"{number} {question}", found["choices"][0]["message"]["content"]

    async def _triton(self, chance: random.Random) -> tuple[str, str]:
        number, question = self._drawn(chance)
        request = triton.ModelInferRequest(model_name="moondream")
        for name, content in (
            ("SKILL", b"query"),
            ("QUESTION", question.encode()),
            ("IMAGE", self._pictures[number]),
        ):
            item = request.inputs.add(name=name, datatype="BYTES", shape=[1])
            item.contents.bytes_contents.append(content)
        request.inputs.add(name="TEMPERATURE", datatype="FP32", shape=[1]).contents.fp32_contents.append(0.0)
        request.inputs.add(name="MAX_TOKENS", datatype="INT32", shape=[1]).contents.int_contents.append(12)
        async with grpc.aio.insecure_channel(
            self._server.address, options=(("grpc.use_local_subchannel_pool", 1),)
        ) as channel:
            call: Any = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=triton.ModelInferRequest.SerializeToString,
                response_deserializer=triton.ModelInferResponse.FromString,
            )
            response = await call(request, timeout=_TOO_LONG_S + 10)
        # One text, behind its length in four bytes.
        return f"{number} {question}", json.loads(response.raw_output_contents[0][4:])["answer"]

    def _post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            f"http://{self._server.http_address}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_TOO_LONG_S + 10) as response:
            return json.load(response)


async def recovered(server: Server, num_processes: int, tally: Tally) -> float:
    """Seconds until all processes serve and nothing is held; complains where that does not come."""
    began = time.monotonic()
    seen = "nothing"
    while time.monotonic() - began < _RECOVERY_S:
        if len(server.children()) == num_processes:
            try:
                async with AsyncClient(server.address, timeout_s=20, max_retries=0, max_retry_s=0) as client:
                    load, adapters = await client.load(), await client.list_adapters()
                held = load.running_request_count, load.waiting_request_count, load.preprocessing_request_count
                in_use = sum(adapter.request_count for adapter in adapters)
                seen = f"{held} requests, {load.used_page_count} pages, {in_use} requests of adapters"
                # A core that has restarted adds its pages to those of all.
                if not any((*held, load.used_page_count, in_use)) and load.page_count == 2 * 1200:
                    return time.monotonic() - began
            except (KestrelClientError, OSError) as error:
                seen = type(error).__name__
        await asyncio.sleep(0.1)
    tally.print_error(f"not as before after {_RECOVERY_S:g} s: {len(server.children())} processes, {seen}")
    return _RECOVERY_S


async def harm(kind: str, server: Server, chance: random.Random) -> None:
    """Do what the fault says, and return when its cause is over."""
    if kind == "frontend":
        os.kill(server.chosen("frontend", chance), signal.SIGKILL)
    elif kind == "core":
        os.kill(server.chosen("core", chance), signal.SIGKILL)
    elif kind == "stopped":
        pid = server.chosen("core", chance)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(_STOPPED_S)
        with contextlib.suppress(OSError):  # the supervisor has killed it
            os.kill(pid, signal.SIGCONT)
    elif kind == "loading":
        before = server.children()
        pid = server.chosen("core", chance)
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(2.5)  # it is started again after a second
        for new in set(server.children().values()) - set(before.values()):
            os.kill(new, signal.SIGKILL)
    elif kind == "descriptors":
        pid = server.chosen("frontend", chance)
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 1, limits[1]))
        await asyncio.sleep(3.0)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@dataclass(slots=True)
class Result:
    """All runs of a fault."""

    kind: str
    num_runs: int = 0
    recovery_s: list[float] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def line(self) -> str:
        """For people."""
        answered = sum(count for name, count in self.tally.ends.items() if name.endswith(" OK"))
        total = self.tally.ends.total()
        slowest = f"{max(self.recovery_s):.1f}" if self.recovery_s else "–"
        ends = ", ".join(f"{name} {count}" for name, count in sorted(self.tally.ends.items()) if " OK" not in name)
        complaints = "; ".join(f"{what} ({count})" for what, count in self.tally.complaints.items()) or "none"
        return (
            f"{self.kind}: {self.num_runs} runs, {answered} of {total} calls answered, back after at most "
            f"{slowest} s; complaints: {complaints}; other ends: {ends or 'none'}"
        )


async def measure(kind: str, num_runs: int, options: Sequence[str], folder: Path, adapter: str) -> Result:
    """Do the harm so often, to one server."""
    result = Result(kind)
    chance = random.Random(kind)
    with serving(options, folder / f"{kind}.log") as server:
        callers = Callers(server, adapter)
        num_processes = len(server.children())
        await callers.learn()
        for _ in range(num_runs):
            duration_s = _LOAD_BEFORE_S + _LOAD_AFTER_S + (_STOPPED_S if kind == "stopped" else 0.0)
            calling = asyncio.ensure_future(callers.run(duration_s))
            await asyncio.sleep(_LOAD_BEFORE_S)
            await harm(kind, server, chance)
            await calling
            result.recovery_s.append(await recovered(server, num_processes, callers.tally))
            result.num_runs += 1
            _say(f"{kind} {result.num_runs}: back after {result.recovery_s[-1]:.1f} s")
            if callers.tally.complaints:
                _say(f"  {dict(callers.tally.complaints)}")
        result.tally = callers.tally
    return result


async def compare(options: Sequence[str], folder: Path, adapter: str) -> Result:
    """Ask a server of several processes and one of one process the same."""
    result = Result("none", num_runs=1)
    known: list[dict[str, str]] = []
    for number, chosen in enumerate((options, options[-2:])):  # the last two say where adapters are
        with serving(chosen, folder / f"none-{number}.log") as server:
            callers = Callers(server, adapter)
            await callers.learn()
            known.append(callers.known)
    several, one = known
    result.tally.ends["all OK"] = sum(several.get(name) == answer for name, answer in one.items())
    for name in one.keys() | several.keys():
        if one.get(name) != several.get(name):
            result.tally.print_error(f"{name}: another answer than of one process")
    return result


async def kill_supervisors(num_runs: int, options: Sequence[str], folder: Path, adapter: str) -> Result:
    """SIGKILL of the supervisor under load: the children end by themselves."""
    result = Result("supervisor")
    for number in range(num_runs):
        with serving(options, folder / f"supervisor-{number}.log") as server:
            callers = Callers(server, adapter, _FEW_QUESTIONS)
            callers.must_not_fail = False
            await callers.learn()
            calling = asyncio.ensure_future(callers.run(_LOAD_BEFORE_S + _LOAD_AFTER_S))
            await asyncio.sleep(_LOAD_BEFORE_S)
            children = server.children()
            server.process.kill()
            began = time.monotonic()
            await calling
            while any("kestrel-grpc" in _title(pid) for pid in children.values()):
                if time.monotonic() - began > _RECOVERY_S:
                    callers.tally.print_error("processes are left")
                    for pid in children.values():
                        os.kill(pid, signal.SIGKILL)
                    break
                await asyncio.sleep(0.05)
            result.recovery_s.append(time.monotonic() - began)
            result.num_runs += 1
            result.tally.ends += callers.tally.ends
            result.tally.complaints += callers.tally.complaints
            _say(f"supervisor {result.num_runs}: all ended after {result.recovery_s[-1]:.1f} s")
    return result


async def end_with_an_error(kind: str, num_runs: int, options: Sequence[str], folder: Path, adapter: str) -> Result:
    """Take away what a process needs to be started again: the server ends, to be started anew."""
    result = Result(kind)
    for number in range(num_runs):
        tree = _TREE
        if kind == "upgrade":
            tree = folder / f"tree-{number}"
            for name in ("kestrel_grpc", "runtime", "kernels", "clients"):
                shutil.copytree(_TREE / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        with serving(options, folder / f"{kind}-{number}.log", tree) as server:
            callers = Callers(server, adapter, _FEW_QUESTIONS)
            callers.must_not_fail = False
            await callers.learn()
            calling = asyncio.ensure_future(callers.run(_LOAD_BEFORE_S + _LOAD_AFTER_S))
            await asyncio.sleep(_LOAD_BEFORE_S)
            if kind == "upgrade":
                with (tree / "kestrel_grpc" / "__init__.py").open("a") as code:
                    code.write("\n# Another build.\n")
                os.kill(server.chosen("frontend", random.Random(number)), signal.SIGKILL)
            else:
                shutil.rmtree(server.folder())
                os.kill(server.chosen("core", random.Random(number)), signal.SIGKILL)
            began = time.monotonic()
            await calling
            try:
                status = await asyncio.to_thread(server.process.wait, _RECOVERY_S)
                if status != 1 or "to be started again" not in server.log.read_text():
                    callers.tally.print_error(f"ended with status {status} without the reason in the log")
            except subprocess.TimeoutExpired:
                callers.tally.print_error("goes on")
            result.recovery_s.append(time.monotonic() - began)
            result.num_runs += 1
            result.tally.ends += callers.tally.ends
            result.tally.complaints += callers.tally.complaints
            _say(f"{kind} {result.num_runs}: ended after {result.recovery_s[-1]:.1f} s")
        if tree is not _TREE:
            shutil.rmtree(tree)
    return result


async def poison_cores(kind: str, num_runs: int, options: Sequence[str], folder: Path, adapter: str) -> Result:
    """A request among others ends each core that runs it."""
    result = Result(kind)
    environment = {poison.VARIABLE: poison.WAYS[1] if kind.endswith("killed") else poison.WAYS[0]}
    for number in range(num_runs):
        log = folder / f"{kind}-{number}.log"
        with serving(options, log, program=poison.__name__, environment=environment) as server:
            callers = Callers(server, adapter, _FEW_QUESTIONS)
            callers.wait_for_ready = True
            num_processes = len(server.children())
            await callers.learn()
            await callers.run_with_poison(_NUM_BESIDE_POISON)
            result.recovery_s.append(await recovered(server, num_processes, callers.tally))
            before = server.children()
            await callers.ask_for_death()
            if server.children() != before:
                callers.tally.print_error("a request that was refused has ended a process")
            result.num_runs += 1
            result.tally.ends += callers.tally.ends
            result.tally.complaints += callers.tally.complaints
            _say(f"{kind} {result.num_runs}: back after {result.recovery_s[-1]:.1f} s")
            if callers.tally.complaints:
                _say(f"  {dict(callers.tally.complaints)}")
    return result


FAULTS = (
    *("none", "frontend", "core", "stopped", "loading", "descriptors", "supervisor", "folder", "upgrade"),
    *("poison", "poison-killed"),
)


def main() -> int:
    """Do all the harm, print a line for each kind; 1 if there are complaints."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", metavar="KIND,…", default=",".join(FAULTS), help="of %(default)s")
    parser.add_argument("--runs", type=int, default=20, help="of each (default: %(default)s)")
    parser.add_argument("--frontends", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--devices", default="cpu,cpu", help="two of them (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench/out/process_faults.json"), help="%(default)s")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - set(FAULTS):
        parser.error(f"no such faults: {', '.join(sorted(unknown))}")
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Path(kestrel_runtime.__path__[0]) / "nano"
        (adapter,) = write_random_adapters(folder / "adapters", model, 1, 4)
        options = (
            *("--frontends", str(arguments.frontends), "--devices", arguments.devices),
            *("--adapters", str(folder / "adapters")),
        )
        for kind in chosen:
            if kind == "none":
                work = compare(options, folder, adapter)
            elif kind == "supervisor":
                work = kill_supervisors(arguments.runs, options, folder, adapter)
            elif kind.startswith("poison"):
                work = poison_cores(kind, arguments.runs, options, folder, adapter)
            elif kind in ("folder", "upgrade"):
                work = end_with_an_error(kind, arguments.runs, options, folder, adapter)
            else:
                work = measure(kind, arguments.runs, options, folder, adapter)
            result = asyncio.run(work)
            results.append(result)
            print(result.line(), flush=True)
    rows = [
        {
            "kind": result.kind,
            "runs": result.num_runs,
            "recovery_s": result.recovery_s,
            "ends": dict(result.tally.ends),
            "complaints": dict(result.tally.complaints),
        }
        for result in results
    ]
    write_json(arguments.json, {"machine": machine_facts(), "faults": rows})
    return 1 if any(result.tally.complaints for result in results) else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
