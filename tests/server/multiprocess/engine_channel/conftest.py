"""The engine behind the channel is one of the tests' own family."""

from tests.runtime.conftest import loaded

__all__ = ["loaded"]
