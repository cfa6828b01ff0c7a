"""Limits of control groups, in trees laid out as kernels and container runtimes lay them out."""

from pathlib import Path

import pytest

from kestrel_runtime.memory.host_limits import (
    available_memory_bytes,
    available_processors,
    processor_quota,
    total_memory_bytes,
)

GIB = 2**30
NO_LIMIT_V1 = "9223372036854771712"


class Host:
    """A `/proc` and a `/sys/fs/cgroup` under a temporary folder."""

    def __init__(self, folder: Path, *, available_gib: float = 64) -> None:
        self.proc = folder / "proc"
        self.top = folder / "sys fs" / "cgroup"
        self.write(self.proc / "meminfo", f"MemTotal: 99 kB\nMemAvailable: {int(available_gib * 2**20)} kB\n")

    def write(self, file: Path, text: object) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def mount(self, kind: str, below: str = "", *, root: str = "/", options: str = "rw") -> None:
        point = str(self.top / below).replace(" ", r"\040")
        self._append("mountinfo", f"31 24 0:28 {root} {point} rw,nosuid - {kind} {kind} {options}")

    def belongs_to(self, *lines: str) -> None:
        for line in lines:
            self._append("cgroup", line)

    def group(self, path: str, **files: object) -> None:
        """Files of a group, dots in their names written as underscores after the controller."""
        for name, text in files.items():
            controller, _, rest = name.partition("_")
            self.write(self.top / path / f"{controller}.{rest}", text)

    def available_gib(self) -> float:
        return available_memory_bytes(self.proc) / GIB

    def _append(self, name: str, line: str) -> None:
        file = self.proc / "self" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as opened:
            opened.write(f"{line}\n")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def used(gib: float, idle_cache_gib: float = 0, **more: int) -> dict[str, object]:
    table = {"anon": 1, "inactive_file": int(idle_cache_gib * GIB), **more}
    return {
        "memory_current": int(gib * GIB),
        "memory_stat": "\n".join(f"{name} {number}" for name, number in table.items()),
    }


def test_without_control_groups_it_is_what_the_machine_has_available(host: Host):
    assert host.available_gib() == 64


def test_a_container_with_its_own_namespace_has_its_limit_less_what_it_uses(host: Host):
    host.mount("cgroup2")
    host.belongs_to("0::/")
    host.group("", memory_max=16 * GIB, **used(9, idle_cache_gib=1.5))
    assert host.available_gib() == 8.5


def test_the_machine_may_have_less_than_the_limit_allows(tmp_path: Path):
    host = Host(tmp_path, available_gib=3)
    host.mount("cgroup2")
    host.belongs_to("0::/")
    host.group("", memory_max=16 * GIB, **used(9))
    assert host.available_gib() == 3


def test_no_limit_is_none(host: Host):
    host.mount("cgroup2")
    host.belongs_to("0::/system.slice/kestrel.service")
    host.group("system.slice/kestrel.service", memory_max="max", memory_high="max", **used(9))
    assert host.available_gib() == 64


def test_the_tightest_of_all_ancestors_holds(host: Host):
    host.mount("cgroup2")
    host.belongs_to("0::/pods/pod1/main")
    host.group("pods", memory_max=40 * GIB, **used(39))
    host.group("pods/pod1", memory_max=20 * GIB, **used(8))
    host.group("pods/pod1/main", memory_max="max", **used(4))
    assert host.available_gib() == 1


def test_a_group_that_would_be_throttled_is_as_limited_as_one_that_would_be_killed(host: Host):
    host.mount("cgroup2")
    host.belongs_to("0::/")
    host.group("", memory_max=16 * GIB, memory_high=12 * GIB, **used(9))
    assert host.available_gib() == 3


def test_more_in_use_than_allowed_leaves_nothing(host: Host):
    host.mount("cgroup2")
    host.belongs_to("0::/")
    host.group("", memory_max=4 * GIB, **used(5))
    assert host.available_gib() == 0


def test_version_1_has_its_own_names_and_its_own_way_to_say_no_limit(host: Host):
    host.mount("cgroup", "memory", options="rw,memory")
    host.mount("cgroup", "cpu,cpuacct", options="rw,cpu,cpuacct")
    host.belongs_to("11:memory:/docker/abc", "4:cpu,cpuacct:/docker/abc", "1:name=systemd:/docker/abc")
    host.group("memory", memory_limit_in_bytes=NO_LIMIT_V1, memory_usage_in_bytes=50 * GIB, memory_stat="cache 1")
    own = "memory/docker/abc"
    stat = f"total_inactive_file {2 * GIB}\nhierarchical_memory_limit {NO_LIMIT_V1}"
    host.group(own, memory_limit_in_bytes=NO_LIMIT_V1, memory_usage_in_bytes=9 * GIB, memory_stat=stat)
    assert host.available_gib() == 64
    host.group(own, memory_limit_in_bytes=16 * GIB)
    assert host.available_gib() == 9


def test_version_1_without_a_namespace_shows_a_container_its_own_group_as_the_uppermost(host: Host):
    host.mount("cgroup", "memory", root="/docker/abc", options="rw,memory")
    host.belongs_to("11:memory:/docker/abc")
    stat = f"total_inactive_file 0\nhierarchical_memory_limit {10 * GIB}"  # of an ancestor that cannot be seen
    host.group("memory", memory_limit_in_bytes=16 * GIB, memory_usage_in_bytes=9 * GIB, memory_stat=stat)
    assert host.available_gib() == 1


def test_both_versions_side_by_side_hold_both(host: Host):
    host.mount("cgroup2", "unified")
    host.mount("cgroup", "memory", options="rw,memory")
    host.belongs_to("11:memory:/a", "0::/b")
    host.group("memory/a", memory_limit_in_bytes=8 * GIB, memory_usage_in_bytes=2 * GIB, memory_stat="cache 1")
    host.group("unified/b", cpu_max="max 100000")  # which has no memory controller there
    assert host.available_gib() == 6


@pytest.mark.parametrize("path", ["/host/only/path", "/../elsewhere"])
def test_a_path_that_is_not_visible_means_the_uppermost_group(host: Host, path: str):
    host.mount("cgroup2")
    host.belongs_to(f"0::{path}")
    host.group("", memory_max=16 * GIB, **used(9))
    assert host.available_gib() == 7


def test_files_that_cannot_be_understood_limit_nothing(host: Host):
    host.mount("cgroup2")
    host.belongs_to("0::/")
    host.group("", memory_max="sixteen", memory_current="", memory_stat="nonsense\n1 2 3", cpu_max="")
    assert host.available_gib() == 64
    assert available_processors(host.proc) == available_processors(host.proc / "nowhere")


def test_a_machine_without_proc_gives_half_of_its_memory(tmp_path: Path):
    assert available_memory_bytes(tmp_path) > 0


@pytest.mark.parametrize(
    ("quota", "processors"), [("100000 100000", 1), ("50000 100000", 1), ("1", None), ("max 100000", None)]
)
def test_processors_are_those_of_the_quota_rounded_up(host: Host, quota: str, processors: int | None):
    host.mount("cgroup2")
    host.belongs_to("0::/a/b")
    host.group("a", cpu_max=quota)
    host.group("a/b", cpu_max="max 100000")
    unlimited = available_processors(host.proc / "nowhere")
    assert available_processors(host.proc) == (unlimited if processors is None else processors)


def test_a_quota_of_processor_time_need_not_be_whole(host: Host):
    host.mount("cgroup2")
    host.belongs_to("0::/a")
    host.group("a", cpu_max="25000 100000")
    assert processor_quota(host.proc) == 0.25
    assert processor_quota(host.proc / "nowhere") == available_processors(host.proc / "nowhere")


@pytest.mark.parametrize(("quota", "is_limited"), [("100000", True), ("-1", False)])
def test_processors_by_version_1(host: Host, quota: str, is_limited: bool):
    host.mount("cgroup", "cpu,cpuacct", options="rw,cpu,cpuacct")
    host.belongs_to("4:cpu,cpuacct:/docker/abc")
    host.group("cpu,cpuacct/docker/abc", cpu_cfs_quota_us=quota, cpu_cfs_period_us="100000")
    unlimited = available_processors(host.proc / "nowhere")
    assert available_processors(host.proc) == (1 if is_limited else unlimited)


def test_this_very_machine_has_memory_and_processors():
    assert available_memory_bytes() > 2**20
    assert available_processors() >= 1


def test_what_there_is_is_the_machines_memory_or_the_smallest_limit(host: Host):
    host.write(host.proc / "meminfo", "MemTotal: 67108864 kB\nMemAvailable: 41943040 kB")
    assert total_memory_bytes(host.proc) == 64 * GIB
    host.mount("cgroup2")
    host.belongs_to("0::/pods/main")
    host.group("pods", memory_max=40 * GIB, **used(39))
    host.group("pods/main", memory_max="max", memory_high=24 * GIB, **used(4))
    assert total_memory_bytes(host.proc) == 24 * GIB
    assert available_memory_bytes(host.proc) == GIB
