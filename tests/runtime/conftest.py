"""``HOLDFAST_EXAMPLES=10`` runs ten times as many hypothesis examples, with ten times the time limit."""

from __future__ import annotations

import os

import pytest

FACTOR = max(1, int(os.environ.get("HOLDFAST_EXAMPLES", "1")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if FACTOR > 1:
        for item in items:
            item.add_marker(pytest.mark.timeout(float(config.getini("timeout")) * FACTOR))
