"""Renders the chart: reads `[[release, values], …]` as JSON, and writes for each the documents or the refusal.

Runs in an environment of its own, with the packages `helm-python-sdk` and `pyyaml`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import yaml
from helm_python import HelmError
from helm_python.chart import Chart, lint


def rendered(chart: Chart, release: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns `documents`, or `refusal`."""
    try:
        chart.validate_schema(values)
        texts = chart.render(values, name=release)
    except HelmError as error:
        return {"refusal": str(error)}
    documents = [document for text in texts.values() for document in yaml.safe_load_all(text) if document]
    return {"documents": documents}


def main() -> None:
    """Write the report of the linter, and what was rendered."""
    path = sys.argv[1]
    with Chart.load(path) as chart:
        results = [rendered(chart, release, values) for release, values in json.load(sys.stdin)]
    json.dump({"lint": lint(path, strict=True), "results": results}, sys.stdout)


if __name__ == "__main__":
    main()
