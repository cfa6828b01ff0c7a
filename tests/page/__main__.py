"""Tests the page in Chromium, which is installed first where it is missing.

python -m tests.page                 # all tests; their screenshots are in build/page
python -m tests.page -k camera       # arguments are those of pytest
python -m tests.page --pictures      # also writes the screenshots of docs/page.md
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from PIL import Image

from tests.page.browser import SCREENSHOTS, chromium
from tests.reference_fixtures import CHECKOUT

PICTURES = CHECKOUT / "docs" / "page"
DOCUMENTED = ("detect-desktop", "query-phone", "segment-phone-dark")
"""The screenshots of docs/page.md."""
_WIDTH_PX = {"desktop": 720, "phone": 250}


def main() -> int:
    """Run the tests; returns the exit status."""
    if chromium() is None:
        if os.geteuid() != 0:
            print("needs Chromium: apt-get install chromium", file=sys.stderr)
            return 1
        for command in ("update", "install --yes --no-install-recommends chromium"):
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            # Others may hold the lock.
            apt = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")
            subprocess.run((*apt, *command.split()), check=True, env=environment)
    arguments = sys.argv[1:]
    writes_pictures = "--pictures" in arguments
    arguments = [item for item in arguments if item != "--pictures"]
    status = pytest.main(["tests/page/in_chromium.py", "tests/page/tutorial_in_chromium.py", *arguments])
    if writes_pictures and status == 0:
        for name in DOCUMENTED:
            _write_picture(name)
    return int(status)


def _write_picture(name: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    width = _WIDTH_PX["phone" if "phone" in name else "desktop"]
    with Image.open(SCREENSHOTS / f"{name}.png") as picture:
        picture.thumbnail((width, 10 * width))
        picture.convert("RGB").save(PICTURES / f"{name}.webp", quality=20, method=6)


if __name__ == "__main__":
    sys.exit(main())
