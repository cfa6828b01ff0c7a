"""Prints what each kind of installation weighs: `python -m tools.install_sizes [KIND ...]`.

Each is installed into an empty environment from this checkout, as the README says, by the pip and the Python that
run this. GPU extras weigh several GB, so they are installed only where they are named.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
CLIENT = "./clients/python"
KINDS = {
    "client": (CLIENT,),
    "base": (CLIENT, "."),
    "server": (CLIENT, ".[server]"),
    "gpu": (CLIENT, ".[gpu]"),
    "gpu-cuda12": (CLIENT, ".[gpu-cuda12]"),
}
"""The arguments of `pip install` for each kind."""
DEFAULT_KINDS = ("client", "base", "server")
_MB = 10**6


def install(python: Path, arguments: Sequence[str]) -> float:
    """Installs into the environment of an interpreter; returns the seconds it took. Raises `CalledProcessError`."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    begun = time.monotonic()
    subprocess.run([*command, "install", "--no-compile", *arguments], cwd=CHECKOUT, check=True)
    return time.monotonic() - begun


def weight(packages: Path) -> tuple[int, int]:
    """Returns the number of distributions in a `site-packages`, and the bytes of its files, without bytecode."""
    found = (path for path in packages.rglob("*") if path.is_file() and path.suffix != ".pyc")
    num_bytes = sum(path.stat().st_size for path in found)
    return len(list(distributions(path=[str(packages)]))), num_bytes


def main() -> int:
    """Installs and prints each kind that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", metavar="KIND", nargs="*", default=DEFAULT_KINDS, help=f"of {', '.join(KINDS)}")
    parser.add_argument(
        "--torch", metavar="ARGUMENTS", help="arguments of a pip that installs PyTorch before the kind `server`"
    )
    arguments = parser.parse_args()
    kinds: Sequence[str] = arguments.kinds
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"{', '.join(unknown)}: is no kind of installation; known are {', '.join(KINDS)}")
    print(f"{'kind':<12}{'packages':>9}{'MB':>8}{'seconds':>9}  pip install")
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="kestrel-install-") as folder:
            venv.create(folder, with_pip=False)
            (packages,) = Path(folder).glob("lib/python*/site-packages")
            python = Path(folder) / "bin" / "python"
            try:
                seconds = install(python, arguments.torch.split()) if arguments.torch and kind == "server" else 0.0
                seconds += install(python, KINDS[kind])
            except subprocess.CalledProcessError as error:
                print(f"{kind}: pip ended with status {error.returncode}", file=sys.stderr)
                return 1
            number, num_bytes = weight(packages)
        print(f"{kind:<12}{number:>9}{num_bytes / _MB:>8.0f}{seconds:>9.1f}  {' '.join(KINDS[kind])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
