"""The manifests of Kubernetes: each has a schema, and names, ports, labels and metrics are the same everywhere."""

import re
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from grpc_health.v1.health import SERVICE_NAME as HEALTH

from kestrel_client.v1 import engine_service_pb2, image_service_pb2, vision_service_pb2
from kestrel_grpc.config.options import ServerConfig, options
from kestrel_grpc.frontends.grpc.reflection import V1, V1ALPHA
from kestrel_grpc.frontends.openai.service import OpenAiService
from kestrel_grpc.frontends.triton.service import TritonService
from kestrel_grpc.telemetry.metrics import METRICS, Kind
from tests.deploy.manifests import (
    BUILT_IN_GROUPS,
    CUSTOM_SCHEMAS,
    KUBERNETES,
    PATCHES,
    WITHOUT_SCHEMA,
    Manifest,
    manifest,
    manifests,
)
from tests.deploy.test_files import complaints, tool
from tests.fakes import FakeEngine
from tests.reference_fixtures import CHECKOUT

GAUGES = {metric.prometheus_name for metric in METRICS if metric.kind is Kind.GAUGE}
AUTOSCALER = manifest("hpa", "autoscaler.yaml")["spec"]
SCALED_OBJECT = manifest("keda", "scaledobject.yaml")["spec"]
POOL = manifest("inference-gateway", "pool.yaml")
PICKER = yaml.safe_load(manifest("inference-gateway", "picker.yaml")["data"]["config.yaml"])


def deployment() -> dict[str, Any]:
    return manifest("deployment.yaml")


def container_of(content: dict[str, Any]) -> dict[str, Any]:
    """The only container of a deployment."""
    (container,) = content["spec"]["template"]["spec"]["containers"]
    return container


def services() -> dict[str, dict[str, Any]]:
    """Specifications of all services by name."""
    return {
        item.content["metadata"]["name"]: item.content["spec"]
        for item in manifests()
        if item.content["kind"] == "Service"
    }


def patched(patch: Path, folder: Path) -> Path:
    """The deployment after a patch, as `kubectl` makes it without a cluster."""
    command = (tool("kubectl"), "patch", "--local", "--filename", str(KUBERNETES / "deployment.yaml"))
    done = subprocess.run(
        (*command, "--patch-file", str(patch), "--output", "yaml"), check=True, capture_output=True, text=True
    )
    result = folder / patch.name
    result.write_text(done.stdout, encoding="utf-8")
    return result


def config_of(content: dict[str, Any]) -> ServerConfig:
    """What a server in this pod is configured with: the variables of the image, and those of the pod."""
    image = (CHECKOUT / "deploy" / "Containerfile").read_text(encoding="utf-8")
    variables = dict(re.findall(r"(KESTREL_GRPC_\w+)=(\S+)", image))
    variables |= {item["name"]: item["value"] for item in container_of(content)["env"] if "value" in item}
    return ServerConfig.parse({}, variables)


def test_the_manifests_are_those_of_kubernetes():
    paths = [str(item.path) for item in manifests() if item.group in BUILT_IN_GROUPS]
    assert complaints(tool("kubernetes-validate"), "--strict", *dict.fromkeys(paths)) == ""


@pytest.mark.parametrize("item", list(manifests()), ids=lambda item: item.name)
def test_every_kind_has_a_schema_or_is_said_to_have_none(item: Manifest):
    assert item.group in BUILT_IN_GROUPS | CUSTOM_SCHEMAS.keys() | WITHOUT_SCHEMA


def test_the_folder_itself_needs_nothing_but_kubernetes():
    applied = [item for item in manifests() if item.path.parent == KUBERNETES]
    assert {item.content["kind"] for item in applied} >= {"Deployment", "Service"}
    assert [item.name for item in applied if item.group not in BUILT_IN_GROUPS] == []


def test_no_folder_brings_two_autoscalers():
    scalers = [item for item in manifests() if item.content["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    folders = [item.path.parent for item in scalers]
    assert len(scalers) == len(set(folders)) == 2
    assert KUBERNETES not in folders


@pytest.mark.parametrize("patch", sorted(PATCHES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_patched_deployment_is_valid_and_starts_a_server(patch, tmp_path):
    path = patched(patch, tmp_path)
    assert complaints(tool("kubernetes-validate"), "--strict", str(path)) == ""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    config_of(content)  # raises an error about options that contradict each other
    kept = ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "volumeMounts")
    before, after = container_of(deployment()), container_of(content)
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


def test_the_patch_for_several_gpus_has_an_engine_on_each(tmp_path):
    content = yaml.safe_load(patched(PATCHES / "several-gpus.yaml", tmp_path).read_text(encoding="utf-8"))
    config = config_of(content)
    assert (config.devices, config.frontends, config.engine.device) == (("all",), "auto", "auto")
    limits, one = (container_of(item)["resources"]["limits"] for item in (content, deployment()))
    num_gpus = limits["nvidia.com/gpu"]
    assert num_gpus > 1
    assert limits["memory"] == f"{num_gpus * int(one['memory'].removesuffix('Gi'))}Gi"


def test_the_patch_for_processors_asks_for_no_gpu(tmp_path):
    path = patched(PATCHES / "processors.yaml", tmp_path)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert config_of(content).engine.device == "cpu"
    assert "nvidia" not in path.read_text(encoding="utf-8")


def test_the_token_of_the_hub_comes_from_a_secret_that_need_not_be_there():
    (variable,) = [item for item in container_of(deployment())["env"] if item["name"] == "HF_TOKEN"]
    secret = variable["valueFrom"]["secretKeyRef"]
    assert secret["optional"] is True
    page = (CHECKOUT / "docs" / "operation.md").read_text(encoding="utf-8")
    assert f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}=" in page


def test_every_selector_selects_the_pods():
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    selectors = [service["selector"] for service in services().values()]
    selectors.append(POOL["spec"]["selector"]["matchLabels"])
    assert [selector for selector in selectors if not selector.items() <= labels.items()] == []


def test_every_port_of_a_service_is_one_of_the_container():
    ports = {port["name"]: port["containerPort"] for port in container_of(deployment())["ports"]}
    for service in services().values():
        assert {port["targetPort"]: port["port"] for port in service["ports"]}.items() <= ports.items()


def test_every_route_leads_to_a_service_or_to_the_pool():
    routes = [item.content for item in manifests() if item.content["kind"].endswith("Route")]
    backends = [backend for route in routes for rule in route["spec"]["rules"] for backend in rule["backendRefs"]]
    assert len(backends) == 2
    for backend in backends:
        if "kind" in backend:
            assert (backend["kind"], backend["name"]) == (POOL["kind"], POOL["metadata"]["name"])
            assert backend["group"] == POOL["apiVersion"].partition("/")[0]
        else:
            assert backend["port"] in [port["port"] for port in services()[backend["name"]]["ports"]]


def test_both_autoscalers_scale_the_deployment_within_the_same_bounds():
    target = deployment()
    assert AUTOSCALER["scaleTargetRef"] == {
        "apiVersion": target["apiVersion"],
        "kind": target["kind"],
        "name": target["metadata"]["name"],
    }
    assert SCALED_OBJECT["scaleTargetRef"] == {"name": target["metadata"]["name"]}
    bounds = (AUTOSCALER["minReplicas"], AUTOSCALER["maxReplicas"])
    assert (SCALED_OBJECT["minReplicaCount"], SCALED_OBJECT["maxReplicaCount"]) == bounds
    assert bounds[0] == target["spec"]["replicas"] < bounds[1]
    assert SCALED_OBJECT["fallback"]["replicas"] == bounds[0]
    behavior = SCALED_OBJECT["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == AUTOSCALER["behavior"]


def test_both_autoscalers_have_the_same_targets_for_metrics_of_the_server():
    targets = {
        item["pods"]["metric"]["name"]: item["pods"]["target"]["averageValue"] for item in AUTOSCALER["metrics"]
    }
    queries = {item["metadata"]["query"]: item["metadata"]["threshold"] for item in SCALED_OBJECT["triggers"]}
    assert queries == {f'sum({name}{{job="kestrel"}})': target for name, target in targets.items()}
    assert targets.keys() == {"kestrel_scheduler_waiting", "kestrel_scheduler_running"}
    assert targets.keys() <= GAUGES
    (batch,) = (option.by_device for option in options() if option.name == "max_batch_size")
    assert batch is not None
    assert float(targets["kestrel_scheduler_running"]) == 0.75 * batch.cuda


def test_the_adapter_offers_the_metrics_of_the_autoscaler():
    (rule,) = adapter_rules()
    (pattern,) = re.findall(r'__name__=~"([^"]*)"', rule["seriesQuery"])
    names = {item["pods"]["metric"]["name"] for item in AUTOSCALER["metrics"]}
    assert {name for name in GAUGES if re.fullmatch(pattern, name)} == names


def adapter_rules() -> list[dict[str, Any]]:
    """The rules for Prometheus' adapter, as the documentation has them."""
    page = (CHECKOUT / "docs" / "operation.md").read_text(encoding="utf-8")
    (block,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "seriesQuery" in block)
    return yaml.safe_load(block)["rules"]["custom"]


def test_the_grpc_route_names_methods_of_the_server_and_none_that_needs_a_certain_pod():
    ours = [vision_service_pb2.DESCRIPTOR, engine_service_pb2.DESCRIPTOR, image_service_pb2.DESCRIPTOR]
    served: dict[str, set[str]] = {
        service.full_name: set(service.methods_by_name)
        for file in (*ours, TritonService.file)
        for service in file.services_by_name.values()
    }
    served |= {name: set() for name in (HEALTH, V1, V1ALPHA)}
    (rule,) = manifest("gateway", "grpcroute.yaml")["spec"]["rules"]
    routed: dict[str, set[str | None]] = {}
    for match in rule["matches"]:
        routed.setdefault(match["method"]["service"], set()).add(match["method"].get("method"))
    assert routed.keys() == served.keys() - {"kestrel.v1.ImageService"}
    assert all(methods <= {None, *served[service]} for service, methods in routed.items())
    of_the_engine = routed["kestrel.v1.EngineService"]
    assert all(method is not None and method.startswith(("Get", "List")) for method in of_the_engine)


def test_the_pool_takes_paths_of_openai_on_the_http_port():
    assert POOL["spec"]["targetPorts"] == [{"number": config_of(deployment()).http_port}]
    nothing = cast("Any", None)
    openai = OpenAiService(nothing, FakeEngine(), model_names=("moondream2",), max_image_bytes=1)
    (rule,) = manifest("inference-gateway", "route.yaml")["spec"]["rules"]
    paths = {match["path"]["value"] for match in rule["matches"]}
    assert paths <= {operation.path for operation in openai.operations}


def test_the_picker_reads_metrics_of_the_server_where_they_need_no_token():
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in PICKER["plugins"]}
    assert plugins["metrics-data-source"] == {"port": config_of(deployment()).metrics_port}
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    assert engine["name"] == plugins["core-metrics-extractor"]["defaultEngine"]
    specifications = {value for key, value in engine.items() if key.endswith("Spec")}
    assert specifications == {"kestrel_scheduler_waiting", "kestrel_scheduler_running"} <= GAUGES
    (profile,), (source,) = PICKER["schedulingProfiles"], PICKER["dataLayer"]["sources"]
    used = [*profile["plugins"], source, *source["extractors"]]
    assert {item["pluginRef"] for item in used} == plugins.keys()
