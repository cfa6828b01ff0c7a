"""Downloads files of the hub into its cache.

Imported only where a name of the hub is given: the hub's library takes as long to import as all of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kestrel_runtime.api.errors import CheckpointError

_Value = TypeVar("_Value")


def download(repository: str, revision: str | None, names: Sequence[str]) -> Path:
    """Downloads those of `names` that the repository has. Returns the folder of the snapshot in the cache.

    Raises `CheckpointError`.
    """
    return Path(
        _ask_hub(
            repository,
            revision,
            lambda: snapshot_download(repository, revision=revision, allow_patterns=list(names)),
        )
    )


def file_names(repository: str, commit: str) -> list[str]:
    """Returns the names of the files of a commit. Raises `CheckpointError`."""
    info = _ask_hub(repository, commit, lambda: HfApi().model_info(repository, revision=commit))
    return [sibling.rfilename for sibling in info.siblings or ()]


def _ask_hub(repository: str, revision: str | None, call: Callable[[], _Value]) -> _Value:
    try:
        return call()
    except GatedRepoError as error:
        text = f"{repository} is gated: accept its terms on {constants.ENDPOINT}/{repository}, then set HF_TOKEN"
        raise CheckpointError(text) from error
    except RepositoryNotFoundError as error:
        text = f"{constants.ENDPOINT} has no repository {repository}, or hides it from those without its token"
        raise CheckpointError(text) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repository} has no revision {revision or 'main'!r}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
        where = f"the cache {constants.HF_HUB_CACHE}"
        text = f"{repository} is not (or not wholly) in {where}, and cannot be downloaded: {reason}"
        raise CheckpointError(text) from error
    except Exception as error:  # errors of the library's HTTP client depend on its version
        first_line = (str(error).splitlines() or [""])[0]
        text = f"cannot download {repository} from {constants.ENDPOINT}: {type(error).__name__}: {first_line}"
        raise CheckpointError(text) from error
