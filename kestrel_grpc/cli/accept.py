"""Implements `kestrel-grpc accept`: compares a checkpoint with a reference on this machine, and writes a page about
it.

The expected answers are those of the public reference implementation if it is installed and the checkpoint contains
its code; otherwise those of this project's plain float32 backend. Starts no server.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel_grpc import __version__
from kestrel_grpc.cli.common import PICTURE_SUFFIXES, refuse, require_engine
from kestrel_grpc.config.options import ConfigurationError, ServerConfig, named_values
from kestrel_grpc.process.machine import machine_facts
from kestrel_grpc.process.terminal import print_error
from kestrel_runtime.api.config import BUILT_IN_MODEL, EngineConfig
from kestrel_runtime.api.errors import CheckpointError

if TYPE_CHECKING:
    from kestrel_grpc.cli.acceptance_page import ReferenceFacts
    from kestrel_runtime.loading.checkpoint import Checkpoint
    from kestrel_runtime.verify.acceptance import PrecisionResult
    from kestrel_runtime.verify.recording import Call, Picture

MAX_TOKENS = 64
"""The longest answer, and the longest reasoning before one, in tokens."""
_MAX_OBJECTS = 20
_SPEED_S = 5.0
_FLOAT8_CAPABILITY = (9, 0)
"""The first compute capability whose float8 products the fused backends use."""
_LAST_ERRORS = 12
"""The last lines of a failed reference that are shown."""


class _NoReference(Exception):
    """The reference cannot answer; the text says why."""


def add_accept_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command; it sets `run`, which takes the parsed arguments and returns the exit status."""
    accept = subparsers.add_parser(
        "accept",
        help="compare a model with its reference implementation on this machine, and write a page",
        description="Compare a checkpoint in each precision with the public reference implementation, run its "
        "skills, measure its speed, and write one HTML page. Exit 0 if it passes. Where transformers is installed "
        "and the checkpoint brings the code of the reference, that code is run.",
    )
    accept.add_argument("--model", default=BUILT_IN_MODEL, help="as for serve (default: the built-in model)")
    accept.add_argument("--revision", help="of a model on the hub")
    accept.add_argument("--device", default="auto", help="as for serve (default: %(default)s)")
    accept.add_argument(
        "--precision",
        choices=("float32", "bfloat16", "float8"),
        action="append",
        help="may be repeated; default: float32, on a GPU also bfloat16, and from Hopper on float8",
    )
    accept.add_argument(
        "--images", metavar="FOLDER", type=Path, help="pictures to compare in addition to drawn ones"
    )
    accept.add_argument(
        "--html", metavar="FILE", type=Path, default=Path("acceptance.html"), help="default: %(default)s"
    )
    reference = accept.add_mutually_exclusive_group()
    reference.add_argument(
        "--reference-python",
        metavar="FILE",
        type=Path,
        help="interpreter of the environment with torch, transformers and safetensors (default: this one)",
    )
    reference.add_argument(
        "--no-reference", action="store_true", help="compare with this project's plain float32 path alone"
    )
    accept.add_argument(
        "--set", metavar="OPTION=VALUE", action="append", default=[], help="an option of serve; may be repeated"
    )
    accept.set_defaults(run=_accept)


def _accept(arguments: argparse.Namespace) -> int:
    require_engine()
    from kestrel_runtime.loading.checkpoint import find_checkpoint

    try:
        configs = {name: _engine_config(arguments, name) for name in _precisions(arguments)}
        pictures = list(_given_pictures(arguments.images))
        arguments.html.touch()  # fails now rather than after a long run
        checkpoint = find_checkpoint(arguments.model, arguments.revision)
        with tempfile.TemporaryDirectory(prefix="kestrel-accept-") as folder:
            return _Acceptance(arguments, checkpoint, Path(folder)).run(configs, pictures)
    except ConfigurationError as error:
        return refuse(error)
    except CheckpointError as error:
        print_error(str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        print_error(f"{error.filename}: {error.strerror}")
    finally:
        if arguments.html.is_file() and not arguments.html.stat().st_size:
            arguments.html.unlink()
    return 1


def _precisions(arguments: argparse.Namespace) -> Sequence[str]:
    if arguments.precision:
        return list(dict.fromkeys(arguments.precision))
    import torch

    if arguments.device == "cpu" or not torch.cuda.is_available():
        return ("float32",)
    has_float8 = torch.cuda.get_device_capability() >= _FLOAT8_CAPABILITY
    return ("float32", "bfloat16", "float8") if has_float8 else ("float32", "bfloat16")


def _engine_config(arguments: argparse.Namespace, precision: str) -> EngineConfig:
    """Parses the engine's options for one precision. Raises `ConfigurationError`."""
    given = {"model": arguments.model, "device": arguments.device, "precision": precision}
    if arguments.revision is not None:
        given["revision"] = arguments.revision
    return ServerConfig.parse({**named_values(arguments.set), **given}, {}).engine_config()


def _given_pictures(folder: Path | None) -> Iterator[Picture]:
    """Yields the pictures of a folder as PNG files, upright and without transparency, which all decoders read
    alike.

    Raises `ConfigurationError` for a file that cannot be read.
    """
    if folder is None:
        return
    import io

    from kestrel_client import InvalidRequest, draw
    from kestrel_runtime.verify.recording import Picture

    for path in sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURE_SUFFIXES):
        try:
            image = draw(path)  # draws nothing, but converts to upright RGB
        except (InvalidRequest, OSError) as error:
            raise ConfigurationError((f"--images: {path} is no image that can be read: {error}",)) from None
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        question = "What is in this picture?"
        yield Picture(f"given-{path.stem}.png", buffer.getvalue(), question, _calls(question, "person"))


def _drawn_pictures() -> Iterator[Picture]:
    from kestrel_grpc.cli.scenes import scenes
    from kestrel_runtime.verify.recording import Picture, call_of, query_call

    for place, scene in enumerate(scenes()):
        calls = _calls(scene.question, scene.object)
        if place == 0:
            refs = [[0.25, 0.75], [0.1, 0.2, 0.6, 0.9]]
            calls.append(query_call("What is here?", spatial_refs=refs))
            calls += [call_of("caption", length=length) for length in ("short", "long")]
        yield Picture(scene.name, scene.data, scene.question, calls)


def _calls(question: str, wanted: str) -> list[Call]:
    """Returns a call of each skill."""
    from kestrel_runtime.verify.recording import call_of, query_call

    return [
        query_call(question),
        query_call(question, reasoning=True),
        call_of("caption", length="normal"),
        call_of("point", object=wanted, max_objects=_MAX_OBJECTS),
        call_of("detect", object=wanted, max_objects=_MAX_OBJECTS),
        call_of("segment", object=wanted),
        call_of("gaze", eye=[0.5, 0.4]),
    ]


@dataclass(frozen=True, slots=True)
class _Acceptance:
    """Runs the command, with a folder for the pictures and the expected answers."""

    arguments: argparse.Namespace
    checkpoint: Checkpoint
    folder: Path

    def run(self, configs: dict[str, EngineConfig], given: Sequence[Picture]) -> int:
        """Records the expected answers, compares each precision and writes the page; returns the exit status."""
        from kestrel_grpc.cli.acceptance_page import page, verdict_line
        from kestrel_runtime.verify.acceptance import Verdict, check_precision
        from kestrel_runtime.verify.recording import query_call, write_questions

        pictures = [*_drawn_pictures(), *given]
        write_questions(self.folder, pictures, [query_call("What is the capital of France?")], MAX_TOKENS)
        config = next(iter(configs.values()))
        try:
            reference = self._reference_answers()
        except _NoReference as reason:
            reference = self._own_answers(config, str(reason))
        print(reference.summary, flush=True)
        results: list[PrecisionResult] = []
        for name, config in configs.items():
            report = _reporter(name)
            result = check_precision(self.folder, name, config, speed_s=_SPEED_S, report=report)
            for line in (*result.failures, *result.problems):
                report(line)
            results.append(result)
        verdict = Verdict.of(results)
        facts = self._facts()
        images = {picture.name: picture.data for picture in pictures}
        self.arguments.html.write_text(
            page(self.checkpoint.name, results, reference, facts, images), encoding="utf-8"
        )
        print(f"{verdict_line(verdict, reference)}; the page is {self.arguments.html}")
        return 0 if verdict is Verdict.PASSED else 1

    def _reference_answers(self) -> ReferenceFacts:
        """Runs the reference. Raises `_NoReference`, and `CheckpointError` if the reference fails."""
        from kestrel_grpc.cli.acceptance_page import ReferenceFacts
        from kestrel_runtime.loading.checkpoint import PUBLISHED_REPOSITORIES

        if self.arguments.no_reference:
            raise _NoReference("--no-reference was given")
        if "AutoModelForCausalLM" not in ((self.checkpoint.config or {}).get("auto_map") or {}):
            raise _NoReference("the checkpoint does not bring the code of the reference")
        name, revision = self.arguments.model, self.checkpoint.revision or ""
        if revision:
            name = PUBLISHED_REPOSITORIES.get(name, (name, None))[0]
        else:
            path = Path(name).expanduser().resolve()
            name = str(path.parent if path.is_file() else path)
        python = self.arguments.reference_python or Path(sys.executable)
        program = files("kestrel_runtime") / "models" / "moondream" / "verify" / "reference_program.py"
        weights = map(str, self.checkpoint.weight_files)
        command = [str(python), str(program), str(self.folder), name, revision, self._device(), *weights]
        print(f"running the reference, which is code of {name} {revision}".rstrip(), flush=True)
        errors = self.folder / "errors.txt"
        with errors.open("w") as file:
            # The program's folder has modules that its libraries must not find.
            environment = {**os.environ, "PYTHONSAFEPATH": "1"}
            status = subprocess.run(command, cwd=self.folder, env=environment, stderr=file, check=False).returncode
        if status == _reference_not_installed() and self.arguments.reference_python is None:
            raise _NoReference("transformers is not installed")
        if status != 0:
            for line in errors.read_text(errors="replace").splitlines()[-_LAST_ERRORS:]:
                print_error(line)
            why = f"{python} has no transformers" if status == _reference_not_installed() else f"status {status}"
            raise CheckpointError(f"the reference did not answer: {why}; --no-reference leaves it out")
        known: dict[str, Any] = json.loads((self.folder / "reference.json").read_text())
        versions = ", ".join(f"{package} {number}" for package, number in known["versions"].items())
        summary = f"Compared with the reference implementation: {name} {revision}".rstrip()
        return ReferenceFacts(True, f"{summary}, in float32 on {known['device']}, with {versions}.", known["notes"])

    def _device(self) -> str:
        from kestrel_runtime.models.loaded_model import device_type

        return device_type(EngineConfig(device=self.arguments.device))

    def _own_answers(self, config: EngineConfig, reason: str) -> ReferenceFacts:
        from kestrel_grpc.cli.acceptance_page import ReferenceFacts
        from kestrel_runtime.verify.recording import record_expected

        print(f"{reason}: answering on the plain float32 path", flush=True)
        num_calls, num_certain = record_expected(self.folder, config)
        note = (
            f"{num_calls - num_certain} of {num_calls} answers change with the last bits of the weights; left out"
        )
        return ReferenceFacts(
            False,
            f"No independent reference was compared ({reason}). The expected answers are those of this project's "
            "own plain float32 path. This shows that precisions and paths agree with each other, not that the "
            "model is computed right.",
            [note] if num_calls > num_certain else [],
        )

    def _facts(self) -> dict[str, str]:
        import torch

        device = self._device()
        facts = {
            "model": self.arguments.model,
            "revision": self.checkpoint.revision or "local files",
            **{path.name: f"sha256 {_digest(path)}" for path in self.checkpoint.weight_files},
            "device": torch.cuda.get_device_name() if device == "cuda" else "the processors",
            **machine_facts(),
            "kestrel-grpc": __version__,
            "torch": torch.__version__,
        }
        if device == "cuda":
            facts["CUDA"] = str(torch.version.cuda)
        for package in ("triton", "pillow", "tokenizers", "safetensors"):
            try:
                facts[package] = version(package)
            except PackageNotFoundError:
                continue
        facts["command"] = shlex.join(("kestrel-grpc", *sys.argv[1:]))
        facts["date"] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        return facts


def _reporter(name: str) -> Callable[[str], None]:
    return lambda line: print(f"{name}: {line}", flush=True)


def _reference_not_installed() -> int:
    from kestrel_runtime.models.moondream.verify.reference_program import NOT_INSTALLED

    return NOT_INSTALLED


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
