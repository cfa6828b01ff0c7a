"""`python -m tests.deploy`: check the manifests whose kinds others define against published schemas, and the chart.

The schemas are packages for Node.js, which are installed below `build/clients/` on first use. Each manifest is also
checked with mistakes in it, which must be found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.catalogue import Client
from tests.clients.environments import ENVIRONMENTS, command
from tests.deploy.manifests import CUSTOM_SCHEMAS, Manifest, manifests

CHECKER = Client(
    "custom-resources",
    str(Path(__file__).with_name("custom_resources.mjs")),
    (*(f"{package}@{version}" for package, version in sorted(set(CUSTOM_SCHEMAS.values()))), "typescript@5"),
)


def main() -> int:
    """Check all manifests of these kinds, and say how many of the checks failed."""
    custom = [manifest for manifest in manifests() if manifest.group in CUSTOM_SCHEMAS]
    checks = [check for manifest in custom for check in checks_of(manifest)]
    items = [item(manifest, content) for manifest, _, content in checks]
    done = subprocess.run(
        command(CHECKER),
        cwd=ENVIRONMENTS / CHECKER.name,
        input=json.dumps(items),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    num_failed = 0
    for (manifest, mistake, _), complaints in zip(checks, json.loads(done.stdout), strict=True):
        failed = bool(complaints) == (mistake is None)
        num_failed += failed
        if mistake is None:
            print(f"{manifest.name}: {'; '.join(complaints) or 'sound'}")
        elif failed:
            print(f"{manifest.name}: not found: {mistake}")
    print(f"{len(checks) - num_failed} passed, {num_failed} failed")
    status = pytest.main(["-q", "-n0", str(Path(__file__).with_name("rendered_chart.py"))])
    return 1 if num_failed or not checks or status else 0


def checks_of(manifest: Manifest) -> Iterator[tuple[Manifest, str | None, dict[str, Any]]]:
    """What is checked: the manifest, the mistake that its content has, if any, and the content."""
    content = manifest.content
    yield manifest, None, content
    yield manifest, "an unknown field", content | {"spec": content["spec"] | {"unknownField": 1}}
    yield manifest, "no specification", {key: value for key, value in content.items() if key != "spec"}
    yield manifest, "a value of a wrong type", content | {"metadata": content["metadata"] | {"name": 1}}


def item(manifest: Manifest, content: dict[str, Any]) -> dict[str, Any]:
    """The content with the class that its kind has in the package."""
    package, _ = CUSTOM_SCHEMAS[manifest.group]
    kind = manifest.content["kind"]
    module = f"{package}/{manifest.content['apiVersion']}/{kind}"
    return {"module": module, "kind": kind, "manifest": content}


if __name__ == "__main__":
    sys.exit(main())
