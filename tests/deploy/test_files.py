"""What is under `deploy/`: each file to its own tool, and what one file says of another is so."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from kestrel_grpc import __version__
from kestrel_grpc.config.options import ServerConfig, options
from kestrel_grpc.config.sources import environment_name
from kestrel_grpc.telemetry.metrics import METRICS
from tests.reference_fixtures import CHECKOUT

DEPLOY = CHECKOUT / "deploy"
OPERATOR = "prometheus-operator"
VARIABLE = re.compile(r"\bKESTREL_(?!GRPC_…)[A-Z_]+")
KNOWN_VARIABLES = {environment_name(option.name) for option in options()}


def tool(name: str) -> str:
    """Where a checker is, beside this Python or on PATH; skips the test where it is not."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def complaints(*command: str) -> str:
    """What a checker has to say; nothing where it is content."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=CHECKOUT)
    said = (done.stdout + done.stderr).strip()
    return said or f"exit status {done.returncode}" if done.returncode else ""


def document(*path: str) -> Any:
    return yaml.safe_load(DEPLOY.joinpath(*path).read_text(encoding="utf-8"))


def test_the_container_file_is_sound():
    assert complaints(tool("hadolint"), "deploy/Containerfile") == ""


def test_every_yaml_file_is_sound():
    assert complaints(tool("yamllint"), "--strict", "--config-file", "deploy/.yamllint", "deploy") == ""


@pytest.mark.parametrize("name", ["compose.yml", "compose.gpu.yml"])
def test_the_compose_file_keeps_to_its_specification(name):
    schema = ("--builtin-schema", "vendor.compose-spec")
    assert complaints(tool("check-jsonschema"), *schema, f"deploy/{name}") == ""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (".github/workflows/ci.yml", "github-workflows"),
        (".github/ISSUE_TEMPLATE/bug.yml", "github-issue-forms"),
        (".github/ISSUE_TEMPLATE/feature.yml", "github-issue-forms"),
        (".github/ISSUE_TEMPLATE/config.yml", "github-issue-config"),
    ],
)
def test_what_github_reads_keeps_to_its_schema(name, kind):
    assert complaints(tool("check-jsonschema"), "--builtin-schema", f"vendor.{kind}", name) == ""


def test_the_workflow_runs_what_ci_runs_with_each_version_of_python_that_the_package_allows():
    workflow = yaml.safe_load((CHECKOUT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["ci"]
    assert "bash .ci/run" in [step.get("run") for step in job["steps"]]
    allowed = SpecifierSet(tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["requires-python"])
    versions = {f"3.{minor}" for minor in range(40) if f"3.{minor}" in allowed}
    assert set(job["strategy"]["matrix"]["python"]) == versions


def test_the_pods_are_scraped_under_the_job_that_the_alerts_select():
    monitor = document("kubernetes", OPERATOR, "podmonitor.yaml")["spec"]
    template = document("kubernetes", "deployment.yaml")["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (container,) = template["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports
    job = labels[monitor["jobLabel"]]
    scraped = {item["job_name"] for item in document("prometheus", "prometheus.yml")["scrape_configs"]}
    alerts = (DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    assert job in scraped
    assert set(re.findall(r'job="([^"]*)"', alerts)) == {job}


def test_the_ports_of_all_files_are_those_that_the_server_opens():
    (container,) = document("kubernetes", "deployment.yaml")["spec"]["template"]["spec"]["containers"]
    told = {item["name"]: item.get("value") for item in container["env"]}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    image = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    (metrics_port,) = re.findall(r"KESTREL_GRPC_METRICS_PORT=(\d+)", image)
    opened = {
        "grpc": ServerConfig().port,
        "http": int(told["KESTREL_GRPC_HTTP_PORT"]),
        "metrics": int(metrics_port),
    }
    assert ports == opened

    services = yaml.safe_load_all((DEPLOY / "kubernetes" / "service.yaml").read_text(encoding="utf-8"))
    offered = [port for service in services for port in service["spec"]["ports"]]
    assert {port["targetPort"]: port["port"] for port in offered} == ports

    (exposed,) = re.findall(r"^EXPOSE (.+)$", image, re.MULTILINE)
    assert {int(port) for port in exposed.split()} == set(ports.values())


def test_compose_publishes_the_ports_of_grpc_and_http_to_this_machine_only():
    server = document("compose.yml")["services"]["kestrel"]
    environment = server["environment"]
    wanted = (ServerConfig().port, int(environment["KESTREL_GRPC_HTTP_PORT"]))
    assert server["ports"] == [f"127.0.0.1:{port}:{port}" for port in wanted]
    assert environment["KESTREL_GRPC_HTTP_HOSTS"] in document("compose.yml")["services"]


def test_a_pod_and_a_container_get_one_gpu():
    (container,) = document("kubernetes", "deployment.yaml")["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    server = document("compose.gpu.yml")["services"]["kestrel"]
    assert document("compose.yml")["services"].keys() >= {"kestrel"}
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])


def test_every_panel_of_the_dashboard_says_what_it_shows():
    panels = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    shown = [panel for panel in panels if panel["type"] != "row"]
    assert [panel["title"] for panel in shown if not panel.get("description", "").endswith(".")] == []
    assert len({panel["id"] for panel in panels}) == len(panels)
    queries = [target["expr"] for panel in shown for target in panel["targets"]]
    assert any("kestrel_device_memory_used_bytes" in query for query in queries)
    assert any("kestrel_device_utilization" in query for query in queries)


def test_every_series_of_the_dashboard_is_one_of_the_server():
    panels = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    named = {name for query in queries for name in re.findall(r"\b(?:kestrel|gen_ai|rpc)_\w+(?=\{)", query)}
    metrics = {re.sub(r"_(?:bucket|sum|count|total)$", "", name) for name in named}
    assert metrics
    assert metrics <= {metric.prometheus_name for metric in METRICS}


def test_the_unit_is_sound_and_well_locked_up(tmp_path):
    analyze = tool("systemd-analyze")
    unit = tmp_path / "kestrel-grpc.service"
    text = (DEPLOY / "systemd" / unit.name).read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/kestrel/bin/kestrel-grpc", sys.executable))  # it must exist to be checked
    assert complaints(analyze, "verify", str(unit)) == ""
    assert complaints(analyze, "security", "--offline=true", "--threshold=25", str(unit)) == ""


@pytest.mark.parametrize(
    "path", sorted(path for path in DEPLOY.rglob("*") if path.is_file()), ids=lambda path: path.name
)
def test_every_option_that_a_file_sets_is_one(path):
    assert set(VARIABLE.findall(path.read_text(encoding="utf-8"))) <= KNOWN_VARIABLES


def test_stopping_the_server_waits_until_it_has_drained():
    drain_s = ServerConfig().withdrawal_delay + ServerConfig().drain_timeout
    pod = document("kubernetes", "deployment.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    before_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    told = {item["name"]: item.get("value") for item in container["env"]}
    told_s = float(told["KESTREL_GRPC_WITHDRAWAL_DELAY"]) + float(told["KESTREL_GRPC_DRAIN_TIMEOUT"])
    assert pod["terminationGracePeriodSeconds"] >= before_s + told_s + 5
    assert (
        float(document("compose.yml")["services"]["kestrel"]["stop_grace_period"].removesuffix("s")) >= drain_s + 5
    )
    unit = (DEPLOY / "systemd" / "kestrel-grpc.service").read_text(encoding="utf-8")
    assert float(re.findall(r"^TimeoutStopSec=(\d+)s$", unit, re.MULTILINE)[0]) >= drain_s + 5


def test_every_file_names_the_image_by_the_version_of_the_package():
    files = [*(path for path in DEPLOY.rglob("*") if path.is_file()), *(CHECKOUT / "docs").glob("*.md")]
    names = [
        name
        for path in files
        for name in re.findall(r"(?:image: |--tag |[ =]all |=on )(kestrel-grpc[\w:.]*)", path.read_text("utf-8"))
    ]
    assert len(names) == 8
    assert set(names) == {f"kestrel-grpc:{__version__}"}


def test_weights_and_kernels_outlive_a_pod_a_container_and_a_service():
    pod = document("kubernetes", "deployment.yaml")["spec"]["template"]["spec"]
    image = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    (folder,) = re.findall(r"^VOLUME (\S+)$", image, re.MULTILINE)
    assert re.findall(r"(?:HF_HOME|TRITON_CACHE_DIR)=(\S+)/\w+", image) == [folder, folder]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    claims = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod["volumes"]}
    volume = document("kubernetes", "volume.yaml")
    assert claims[mounts[folder]] == {"claimName": volume["metadata"]["name"]}
    assert f"models:{folder}" in document("compose.yml")["services"]["kestrel"]["volumes"]
    unit = (DEPLOY / "systemd" / "kestrel-grpc.service").read_text(encoding="utf-8")
    state = f"%S/{re.findall('^StateDirectory=(.+)$', unit, re.MULTILINE)[0]}"
    assert re.findall(r"(?:HF_HOME|TRITON_CACHE_DIR)=(\S+)/\w+", unit) == [state, state]


def test_compose_serves_the_built_in_model_until_it_is_given_a_gpu():
    assert "KESTREL_GRPC_MODEL" not in document("compose.yml")["services"]["kestrel"]["environment"]
    server = document("compose.gpu.yml")["services"]["kestrel"]["environment"]
    assert server["KESTREL_GRPC_MODEL"] == "${MODEL:-moondream2}"


def test_the_documentation_has_the_versions_of_torch_that_are_installed():
    page = (CHECKOUT / "docs" / "operation.md").read_text(encoding="utf-8")
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (least,) = re.findall(r"accepts PyTorch from (\S+) on", page)
    assert f"torch>={least}" in project["optional-dependencies"]["server"]
    rows = dict(re.findall(r"^\| on (a GPU|processors): .*? \| (.*?) \|", page, re.MULTILINE))
    assert rows["a GPU"].startswith(f"{locked()['torch']} ")
    assert rows["a GPU"].endswith(f"Triton {locked()['triton']}")
    (tested,) = re.findall(r"^TORCH \?= torch==(\S+)$", (CHECKOUT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert rows["processors"] == tested


def test_prometheus_scrapes_the_services_of_the_compose_file():
    jobs = document("prometheus", "prometheus.yml")["scrape_configs"]
    targets = {target.split(":")[0] for job in jobs for item in job["static_configs"] for target in item["targets"]}
    assert targets <= set(document("compose.yml")["services"])


def test_every_file_that_compose_mounts_is_there():
    services = document("compose.yml")["services"].values()
    mounted = [item.split(":")[0] for service in services for item in service.get("volumes", ())]
    files = [DEPLOY / source for source in mounted if source.startswith(".")]
    assert files
    assert [path for path in files if not path.exists()] == []


def locked() -> dict[str, str]:
    """Version by name."""
    text = (DEPLOY / "requirements.lock").read_text(encoding="utf-8")
    return {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+) \\$", text, re.MULTILINE)
    }


def test_every_version_in_the_lock_has_a_hash():
    text = (DEPLOY / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip())
    assert len(entries) == len(locked())
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_lock_holds_the_versions_that_the_gpu_was_measured_with():
    results = CHECKOUT / "bench" / "results"
    measured = json.loads((results / "serve-moondream2.json").read_text(encoding="utf-8"))["machine"]
    text = (results / "README.md").read_text(encoding="utf-8")
    (triton,) = set(re.findall(r"\bTriton (\d+\.\d+)", text))
    assert locked()["torch"] == measured["torch"].partition("+")[0]
    assert locked()["triton"].startswith(f"{triton}.")


def test_the_lock_holds_a_fitting_version_of_every_dependency():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [
        *project["dependencies"],
        *(line for name in ("server", "gpu", "otel", "remote") for line in extras[name]),
    ]
    # Built from the checkout.
    versions = locked() | {"kestrel-grpc-client": __version__, "kestrel-grpc": __version__}
    unfit = [
        line
        for line, requirement in ((line, Requirement(line)) for line in needed)
        if not requirement.specifier.contains(
            versions.get(canonicalize_name(requirement.name), "0"), prereleases=True
        )
    ]
    assert unfit == [], "lock anew: make supply"


def test_what_callers_cause_is_no_fault_of_the_server():
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    (rule,) = [rule for group in groups for rule in group["rules"] if rule.get("alert") == "KestrelServerFaults"]
    codes = re.search(r'rpc_response_status_code=~"([A-Z_|]+)"', rule["expr"])
    assert codes is not None
    assert set(codes[1].split("|")) == {"UNKNOWN", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
