"""The Helm chart, rendered by Helm: it has the manifests of `deploy/kubernetes/`, as values change them.

Part of `python -m tests.deploy`, which installs Helm's library into an environment of its own.
"""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kestrel_grpc import __version__
from tests.clients.catalogue import Client
from tests.clients.environments import ENVIRONMENTS, Unavailable, command
from tests.deploy.manifests import KUBERNETES, manifests
from tests.deploy.test_files import complaints, tool
from tests.deploy.test_kubernetes import config_of, container_of
from tests.reference_fixtures import CHECKOUT

CHART = CHECKOUT / "deploy" / "helm"
INSTANCE = "app.kubernetes.io/instance"
RENDERER = Client(
    "helm", str(Path(__file__).with_name("helm_render.py")), ("helm-python-sdk==0.2.2", "pyyaml==6.0.3")
)
VALUES: dict[str, dict[str, Any]] = {
    "none": {},
    "processors": {"gpus": 0, "resources": {"requests": {"cpu": "8"}}},
    "four GPUs": {"gpus": 4, "resources": {"limits": {"memory": "64Gi"}}},
    "options": {"options": {"model": "moondream3-preview", "max-adapter-bytes": 2**30, "reflection": False}},
    "no tokens": {"tokensSecret": "", "hubSecret": "hub", "options": {"insecure-public": True}},
    "one replica": {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "storage": {"accessMode": "ReadWriteOnce", "size": "9Gi", "className": "fast"},
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "a misspelt value": {"replica": 3},
    "half a GPU": {"gpus": 0.5},
    "a port": {"options": {"port": 1}},
    "a list": {"options": {"model": ["a"]}},
    "an open door": {"tokensSecret": ""},
    "a variable": {"options": {"KESTREL_GRPC_MODEL": "a"}},
}


@pytest.fixture(scope="module")
def helm() -> dict[str, Any]:
    asked = [*(("kestrel", values) for values in VALUES.values()), *(("x", values) for values in REFUSED.values())]
    asked.append(("other-7", {}))
    try:
        words = (*command(RENDERER), str(CHART))
    except Unavailable as reason:
        pytest.skip(str(reason))
    done = subprocess.run(
        words,
        cwd=ENVIRONMENTS / RENDERER.name,
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found = json.loads(done.stdout)
    return {"lint": found["lint"], **dict(zip((*VALUES, *REFUSED, "other"), found["results"], strict=True))}


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(document for document in documents if document["kind"] == kind)


def without_instance(value: Any) -> Any:
    """The document without the labels that tell releases apart."""
    if isinstance(value, list):
        return [without_instance(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: without_instance(item) for name, item in value.items() if name != INSTANCE}
    return {name: item for name, item in kept.items() if (name, item) != ("labels", {})}


def test_the_linter_finds_nothing_but_the_missing_icon(helm: dict[str, Any]):
    assert helm["lint"]["errors"] == []
    assert [message["error"] for message in helm["lint"]["messages"]] == ["icon is recommended"]


def test_the_version_is_that_of_the_server():
    facts = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (facts["version"], facts["appVersion"]) == (__version__, __version__)


def test_without_values_the_manifests_are_those_of_the_folder(helm: dict[str, Any]):
    plain = [item.content for item in manifests() if item.path.parent == KUBERNETES]
    by_name = [
        {(item["kind"], item["metadata"]["name"]): without_instance(item) for item in documents}
        for documents in (helm["none"]["documents"], plain)
    ]
    assert by_name[0] == by_name[1]
    assert len(by_name[0]) == len(plain)


@pytest.mark.parametrize("name", VALUES)
def test_what_is_rendered_is_valid_and_starts_a_server(helm: dict[str, Any], name: str, tmp_path: Path):
    documents = helm[name]["documents"]
    path = tmp_path / "rendered.yaml"
    path.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    assert complaints(tool("kubernetes-validate"), "--strict", str(path)) == ""
    config_of(of_kind(documents, "Deployment"))  # raises an error about options that contradict each other


def test_selectors_tell_releases_apart(helm: dict[str, Any]):
    documents = helm["other"]["documents"]
    pods = of_kind(documents, "Deployment")["spec"]
    labels = pods["template"]["metadata"]["labels"]
    assert labels[INSTANCE] == "other-7"
    selectors = [item["spec"]["selector"] for item in documents if "selector" in item["spec"]]
    assert len(selectors) == 4
    for selector in selectors:
        assert selector.get("matchLabels", selector) == labels
    assert sorted(item["metadata"]["name"] for item in documents) == ["other-7"] * 4 + ["other-7-http"]
    claims = [item["persistentVolumeClaim"]["claimName"] for item in pods["template"]["spec"]["volumes"][:1]]
    assert claims == ["other-7"]


def test_values_reach_the_pods(helm: dict[str, Any]):
    def deployment(name: str) -> dict[str, Any]:
        return of_kind(helm[name]["documents"], "Deployment")

    processors = deployment("processors")
    assert config_of(processors).engine.device == "cpu"
    assert "nvidia" not in json.dumps(processors)
    assert container_of(processors)["resources"]["requests"] == {"cpu": "8", "memory": "8Gi"}
    gpus = config_of(deployment("four GPUs"))
    assert (gpus.devices, gpus.frontends, gpus.engine.device) == (("all",), "auto", "auto")
    assert container_of(deployment("four GPUs"))["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 4}
    options = config_of(deployment("options"))
    expected = ("moondream3-preview", 2**30, "off")
    assert (options.engine.model, options.max_adapter_bytes, options.reflection) == expected
    open_ = copy.deepcopy(deployment("no tokens"))
    assert config_of(open_).tokens is None
    assert "/etc/kestrel" not in json.dumps(open_)
    assert '"name": "hub"' in json.dumps(open_)
    documents = helm["one replica"]["documents"]
    assert deployment("one replica")["spec"]["strategy"] == {"type": "Recreate"}
    assert of_kind(documents, "PersistentVolumeClaim")["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "9Gi"}},
        "storageClassName": "fast",
    }


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_would_have_no_effect_or_a_wrong_one_are_refused(helm: dict[str, Any], name: str):
    assert "documents" not in helm[name]
    assert helm[name]["refusal"]
