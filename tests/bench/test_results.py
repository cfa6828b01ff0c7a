"""The pages of bench: numbers are those of the files that they name, and every bench is listed."""

import json
import re

from tests.reference_fixtures import CHECKOUT

RESULTS = CHECKOUT / "bench" / "results"


def test_every_number_of_the_table_is_in_the_file_that_it_names():
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (Moondream \d) \| \w+ \| (\w+) \| (\d+) \| ([\d.]+) \| ([\d,.]+) \| .* \| `([\w.-]+)` \|$", page, re.M
    )
    assert len(rows) == page.count("| `serve-")
    for model, workload, load, requests_per_s, p50_ms, file in rows:
        found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        assert found["server"]["architecture"] == model.lower().replace(" ", "")
        (row,) = (r for r in found["rows"] if (r["workload"], r["load"]) == (workload, int(load)))
        assert f"{row['requests_per_s']:.1f}" == requests_per_s
        measured_ms = row["total_ms"]["p50"]
        assert (f"{measured_ms:.1f}" if measured_ms < 100 else f"{measured_ms:,.0f}") == p50_ms


def test_the_page_names_every_bench_and_no_other():
    folder = CHECKOUT / "bench"
    tables = re.findall(r"^\| .* \| `([\w.]+)", (folder / "README.md").read_text(encoding="utf-8"), re.M)
    packages = {path.parent.name for path in folder.glob("*/__main__.py")}
    benches = {path.stem for path in folder.glob("*.py")} | packages
    assert {name.partition(".")[0] for name in tables} == benches
    assert all((folder / f"{name.replace('.', '/')}.py").exists() or name in packages for name in tables)
