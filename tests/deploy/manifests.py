"""The manifests of Kubernetes below `deploy/`, and what has a schema for each kind."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.reference_fixtures import CHECKOUT

KUBERNETES = CHECKOUT / "deploy" / "kubernetes"
# Changes to the deployment, which are no manifests by themselves.
PATCHES = KUBERNETES / "variants"
BUILT_IN_GROUPS = frozenset({"", "apps", "autoscaling", "policy"})
"""Groups that `kubernetes-validate` has schemas for."""
CUSTOM_SCHEMAS = {
    "gateway.networking.k8s.io": ("@kubernetes-models/gateway-api", "2"),
    "keda.sh": ("@kubernetes-models/keda", "2"),
    "monitoring.coreos.com": ("@kubernetes-models/prometheus-operator", "6"),
}
"""Package for Node.js and its major version, by group: see `python -m tests.deploy`."""
WITHOUT_SCHEMA = frozenset({"inference.networking.k8s.io"})
"""Groups for which no package has a schema, as the documentation says."""


@dataclass(frozen=True)
class Manifest:
    """One document of a file."""

    path: Path
    content: dict[str, Any]

    @property
    def group(self) -> str:
        """Of its API; empty for the core of Kubernetes."""
        return self.content["apiVersion"].rpartition("/")[0]

    @property
    def name(self) -> str:
        """Such as `hpa/autoscaler.yaml HorizontalPodAutoscaler`."""
        return f"{self.path.relative_to(KUBERNETES)} {self.content['kind']}"


def manifests() -> Iterator[Manifest]:
    """All manifests, sorted by path."""
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        if PATCHES not in path.parents:
            for content in yaml.safe_load_all(path.read_text(encoding="utf-8")):
                yield Manifest(path, content)


def manifest(*path: str) -> dict[str, Any]:
    """The only document of a file."""
    return yaml.safe_load(KUBERNETES.joinpath(*path).read_text(encoding="utf-8"))
