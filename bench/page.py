"""A page with plots of the numbers that `bench.serve` has written, on any machine with matplotlib.

python -m bench.page bench/out/serve.json
python -m bench.page bench/results/serve-moondream2.json --parts bench/results/{decode_step,vision,prefill}.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.harness.page import write_page
from bench.harness.report import Results


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, metavar="JSON", help="what bench.serve has written")
    parser.add_argument(
        "--parts", type=Path, nargs="*", default=[], help="results of other benches, to plot as well"
    )
    parser.add_argument("--html", type=Path, help="the page (default: beside the JSON)")
    arguments = parser.parse_args()
    results = Results.from_json(json.loads(arguments.json.read_text()))
    html = arguments.html or arguments.json.with_suffix(".html")
    write_page(html, results, {file.stem: json.loads(file.read_text()) for file in arguments.parts})
    print(html)
    return 0


if __name__ == "__main__":
    sys.exit(main())
