"""`python -m tests.ray [OPTION…]`: run the tests of the application for Ray Serve; the options are those of pytest.

Ray is installed into an environment of its own, `build/ray`, since it brings versions of packages that ours need
not go with. That environment finds everything else in the one of this Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.reference_fixtures import CHECKOUT

ENVIRONMENT = CHECKOUT / "build" / "ray"
PACKAGES = ("ray[serve]==2.60.0",)
"""The one version that docs/ray.md speaks of: the tests rely on how its proxy treats errors."""
ROOTS = (CHECKOUT, *(CHECKOUT / name for name in ("runtime", "kernels", "clients/python")))
"""Where our packages are, for the processes that Ray starts as well."""


def main() -> int:
    """Run the tests; returns the exit status of pytest."""
    python = install()
    # Elsewhere warnings are errors; those of Ray are not ours.
    pytest = ("-m", "pytest", "--verbosity=1", "--override-ini=filterwarnings=ignore", "tests/ray/on_ray.py")
    command = (str(python), *pytest, *sys.argv[1:])
    return subprocess.run(command, cwd=CHECKOUT, env=environment(), check=False).returncode


def environment() -> dict[str, str]:
    """The variables of a program that runs in the environment."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, ROOTS))}


def install() -> Path:
    """The Python of the environment, which is made anew where the packages or this Python have changed."""
    python = ENVIRONMENT / "bin" / "python"
    ours = sysconfig.get_path("purelib")
    stamp, wanted = ENVIRONMENT / "installed.json", json.dumps([*PACKAGES, ours])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    subprocess.run((sys.executable, "-m", "venv", str(ENVIRONMENT)), check=True)
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run((*pip, *PACKAGES), check=True)
    own = sysconfig.get_path("purelib", vars={"base": str(ENVIRONMENT), "platbase": str(ENVIRONMENT)})
    # Behind its own packages, so that Ray finds the versions that were installed for it.
    Path(own, "kestrel.pth").write_text(f"{ours}\n")
    stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    sys.exit(main())
