"""An adapter of another model is said in the log, and no adapter of the served one is."""

import logging
from typing import Any

import pytest

from kestrel_runtime.adapters.base_model import ServedModel
from kestrel_runtime.api.config import BUILT_IN_MODEL

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PUBLISHED = ServedModel("moondream2", "vikhyatk/moondream2", ("2025-06-21", COMMIT))
NEWEST = ServedModel("moondream3-preview", "moondream/moondream3-preview", (COMMIT,))
BUILT_IN = ServedModel(BUILT_IN_MODEL, None)
LOCAL = ServedModel("my-moondream", None)
CACHED = "/home/me/.cache/huggingface/hub/models--vikhyatk--moondream2/snapshots"


@pytest.mark.parametrize(
    ("served", "base", "revision", "level"),
    [
        (PUBLISHED, "vikhyatk/moondream2", None, None),
        (PUBLISHED, "vikhyatk/moondream2", "2025-06-21", None),
        (PUBLISHED, "vikhyatk/moondream2", COMMIT, None),
        (PUBLISHED, "vikhyatk/moondream2", COMMIT[:10], None),
        (PUBLISHED, "vikhyatk/moondream2", "main", None),
        (PUBLISHED, "Vikhyatk/Moondream2", "", None),
        (PUBLISHED, "moondream2", None, None),
        (PUBLISHED, "/data/moondream2/", None, None),
        (PUBLISHED, "copies/moondream2", None, None),
        (PUBLISHED, f"{CACHED}/{COMMIT}", None, None),
        (PUBLISHED, f"{CACHED}/{COMMIT[::-1]}", None, logging.WARNING),
        (PUBLISHED, "vikhyatk/moondream2", "2024-08-26", logging.WARNING),
        (PUBLISHED, "vikhyatk/moondream2", COMMIT[::-1], logging.WARNING),
        (PUBLISHED, "moondream/moondream3-preview", None, logging.WARNING),
        (PUBLISHED, BUILT_IN_MODEL, None, logging.WARNING),
        (PUBLISHED, "/data/base", None, logging.INFO),
        (PUBLISHED, "../runs/base", None, logging.INFO),
        (NEWEST, "moondream/moondream3-preview", None, None),
        (NEWEST, "moondream/moondream3-preview", "main", None),
        (NEWEST, "moondream/moondream3-preview", "v2", logging.WARNING),
        (NEWEST, "vikhyatk/moondream2", None, logging.WARNING),
        (BUILT_IN, BUILT_IN_MODEL, None, None),
        (BUILT_IN, "vikhyatk/moondream2", "2024-08-26", logging.WARNING),
        (BUILT_IN, "/data/base", None, logging.WARNING),
        (LOCAL, "/data/my-moondream", None, None),
        (LOCAL, "vikhyatk/moondream2", "2024-08-26", logging.INFO),
        (LOCAL, "someone/my-moondream", "v2", logging.INFO),
        (PUBLISHED, None, "2024-08-26", None),
        (PUBLISHED, "", None, None),
        (PUBLISHED, 7, None, None),
        (PUBLISHED, ["a"], {"b": 1}, None),
        (PUBLISHED, "vikhyatk/moondream2", 7, None),
    ],
)
def test_a_base_model_that_is_not_the_served_one_is_logged(
    served: ServedModel, base: Any, revision: Any, level: int | None, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        served.log_difference("colours", {"base_model_name_or_path": base, "revision": revision})
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    if level is not None:
        text = caplog.text
        assert "'colours' says that it was trained on" in text
        assert served.name in text or (served.repository or "") in text


def test_an_adapter_without_a_configuration_is_of_no_other_model(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        BUILT_IN.log_difference("colours", None)
        BUILT_IN.log_difference("colours", {})
    assert caplog.text == ""


def test_a_long_name_is_cut(caplog: pytest.LogCaptureFixture):
    BUILT_IN.log_difference("colours", {"base_model_name_or_path": "a" * 10**6, "revision": "b" * 10**6})
    assert 0 < len(caplog.text) < 1000
