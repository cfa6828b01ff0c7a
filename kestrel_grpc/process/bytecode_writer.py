"""Writes bytecode: of files, or of modules and all that they import at their top level.

`bytecode.py` runs it as a process of its own, which has the standard library alone. Other modules do not import it.
"""

from __future__ import annotations

import dis
import json
import os
import select
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import IO

_NICENESS = 19
_ALL = ".*"


def main(folder: str) -> None:
    """Writes to the folder what standard input asks for: `files`, or `modules` by several processes."""
    asked = json.load(sys.stdin)
    sys.pycache_prefix, sys.dont_write_bytecode = folder, False
    if "files" in asked:
        os.nice(_NICENESS)
        for file in asked["files"]:
            _code_of("", file)
        if asked["last"] is not None:
            Path(asked["last"]).touch()
    else:
        _write_imported(_Modules(asked["folders"], asked["path"]), asked["modules"], asked["num_processes"])


def _code_of(name: str, file: str) -> CodeType | None:
    """Returns the code of a source file, and writes its bytecode if there is none; None if it has no valid code."""
    with suppress(ImportError, OSError, SyntaxError, ValueError):
        return SourceFileLoader(name, file).get_code(name)
    return None


class _Modules:
    """Finds the files of modules by name, each once."""

    def __init__(self, folders: Mapping[str, str], path: Sequence[str]) -> None:
        """Takes the folders of some packages, and those in which all other modules are looked for."""
        self._folders = dict(folders)
        self._path = path
        self._known: set[str] = set()

    def new(self, name: str) -> Iterator[tuple[str, str]]:
        """Yields name and file of a module and of the packages around it, where they are new and have a source."""
        if name.endswith(_ALL):
            package = name.removesuffix(_ALL)
            yield from self.new(package)
            folder = Path(self._folders[package])
            for file in sorted(folder.rglob("*.py")):
                inside = file.relative_to(folder).with_suffix("").parts
                yield from self.new(".".join((package, *inside)).removesuffix(".__init__"))
            return
        parts = name.split(".")
        for count in range(1, 1 + len(parts)):
            own = ".".join(parts[:count])
            if own not in self._known:
                self._known.add(own)
                if (file := self._file(own)) is not None:
                    yield own, file

    def _file(self, name: str) -> str | None:
        package, _, last = name.rpartition(".")
        above = self._folders.get(package)
        if name in self._folders:
            folders = [self._folders[name]]
        elif package:
            folders = [] if above is None else [os.path.join(above, last)]
        else:
            folders = [os.path.join(folder, last) for folder in self._path]
        for folder in folders:
            if os.path.isfile(file := os.path.join(folder, "__init__.py")):
                self._folders[name] = folder
                return file
            if os.path.isfile(file := f"{folder}.py"):
                return file
            if os.path.isdir(folder):  # a package without a module of its own
                self._folders.setdefault(name, folder)
        return None


def _write_imported(modules: _Modules, names: Sequence[str], num_processes: int) -> None:
    """Has forked processes compile one module after the other; each reports what its module imports."""
    waiting = deque(found for name in names for found in modules.new(name))
    idle = [_started() for _ in range(num_processes)]
    busy: dict[int, tuple[IO[str], IO[str]]] = {}
    poll = select.poll()
    for _, answers in idle:
        poll.register(answers, select.POLLIN)
    while busy or (waiting and idle):
        while waiting and idle:
            jobs, answers = idle.pop()
            busy[answers.fileno()] = jobs, answers
            jobs.write("\t".join(waiting.popleft()) + "\n")
            jobs.flush()
        for descriptor, _ in poll.poll():
            process = busy.pop(descriptor)
            answer = process[1].readline()
            if not answer:  # the process has ended
                poll.unregister(descriptor)
                continue
            idle.append(process)
            waiting.extend(found for name in answer.split() for found in modules.new(name))


def _started() -> tuple[IO[str], IO[str]]:
    """Returns the pipe for the jobs of a new process, and the one of its answers."""
    (job_end, jobs), (answers, answer_end) = os.pipe(), os.pipe()
    if os.fork() == 0:
        try:
            os.close(jobs)
            os.close(answers)
            _answer(os.fdopen(job_end), os.fdopen(answer_end, "w"))
        finally:
            os._exit(0)
    os.close(job_end)
    os.close(answer_end)
    return os.fdopen(jobs, "w"), os.fdopen(answers)


def _answer(jobs: IO[str], answers: IO[str]) -> None:
    """Compiles module after module, until no more can be asked for."""
    for line in jobs:
        name, file = line.rstrip("\n").split("\t")
        code = _code_of(name, file)
        package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
        answers.write(" ".join(() if code is None else imported_by(code, package)) + "\n")
        answers.flush()


def imported_by(code: CodeType, package: str) -> Iterator[str]:
    """Yields the names that the code of a module imports outside of functions and of `if TYPE_CHECKING`.

    Names from modules may be those of modules, too.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    skipped_until = 0
    for number, step in enumerate(steps):
        if step.offset < skipped_until:
            continue
        if step.argval == "TYPE_CHECKING" and step.opname.startswith("LOAD_"):
            branches = [later for later in steps[number + 1 : number + 4] if "_IF_FALSE" in later.opname]
            skipped_until = branches[0].argval if branches else 0
        elif step.opname == "IMPORT_NAME":
            level, names = steps[number - 2].argval, steps[number - 1].argval
            above = package.split(".")[: len(package.split(".")) + 1 - level] if level else []
            module = ".".join((*above, step.argval) if step.argval else above)
            yield module
            yield from (f"{module}.{name}" for name in names or () if name != "*")


if __name__ == "__main__":
    main(sys.argv[1])
