"""Runs engines of loaded models for the time of a test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel


@asynccontextmanager
async def served(loaded: LoadedModel, **settings: Any) -> AsyncIterator[LocalEngine]:
    """Yields an engine with these settings, which ends afterwards."""
    engine = LocalEngine(loaded, EngineConfig(model="", **settings))
    try:
        yield engine
    finally:
        engine.close()
