"""Compares the model that an adapter says it was trained on with the one that is served."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kestrel_runtime.api.config import BUILT_IN_MODEL

_MAX_ECHO_CHARS = 128
_MIN_COMMIT_CHARS = 7
_REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)
_CACHED = re.compile(r"(?:.*/)?models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]+)/?", re.ASCII)
"""A folder in the cache of the hub's library."""
_MOVING_REVISIONS = ("", "main", "head")
"""They name another commit from time to time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model, in the words in which adapters may name it."""

    name: str
    repository: str | None
    """On the hub; None for local files and the built-in model."""
    revisions: tuple[str, ...] = ()
    """Names of the served revision of the repository: what was asked for, and its commit."""

    def log_difference(self, adapter: str, config: Mapping[str, Any] | None) -> None:
        """Logs a warning if `adapter_config.json` names another model or another revision than the served one.

        If one of the two is a local path, they cannot be compared, and the line is informative.
        """
        base, revision = _named(config or {})
        if not base:
            return
        own = f"{self.repository or self.name}" + (f" ({', '.join(self.revisions)})" if self.revisions else "")
        if not self._has_name(base):
            is_known = self.name == BUILT_IN_MODEL or (self.repository is not None and _is_repository(base))
        elif self._may_have_revision(revision):
            return
        else:
            is_known = bool(self.revisions)
        level, end = (
            (logging.WARNING, "; its answers may be wrong")
            if is_known
            else (logging.INFO, "; that must be the same")
        )
        of_revision = f", revision {revision[:_MAX_ECHO_CHARS]!r}" if revision else ""
        text = "adapter %r says that it was trained on %r%s, and the served model is %s%s"
        _log.log(level, text, adapter, base[:_MAX_ECHO_CHARS], of_revision, own, end)

    def _has_name(self, base: str) -> bool:
        names = {name.casefold() for name in (self.name, self.repository) if name is not None}
        # A copy keeps the last part: a folder, or a repository of another owner.
        return base.casefold() in names or _last(base) in map(_last, names)

    def _may_have_revision(self, revision: str) -> bool:
        if revision.casefold() in _MOVING_REVISIONS or revision in self.revisions:
            return True
        is_commit = len(revision) >= _MIN_COMMIT_CHARS
        return is_commit and any(own.startswith(revision) for own in self.revisions)


def _named(config: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the model and the revision that a configuration names; empty where it names none."""
    base, revision = (
        value if isinstance(value, str) else ""
        for value in (config.get("base_model_name_or_path"), config.get("revision"))
    )
    cached = _CACHED.fullmatch(base)
    if cached is not None:
        return f"{cached[1]}/{cached[2]}", revision or cached[3]
    return base.strip(), revision.strip()


def _is_repository(base: str) -> bool:
    return _REPOSITORY.fullmatch(base) is not None or base == BUILT_IN_MODEL


def _last(name: str) -> str:
    return re.split(r"[/\\]", name.casefold().rstrip("/\\"))[-1]
