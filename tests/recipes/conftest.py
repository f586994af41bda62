"""Bridge's ranks, patient with gloo."""

from tests.bridge.conftest import bridge_ranks

__all__ = ["bridge_ranks"]
