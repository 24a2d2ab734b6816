"""These run in a process of their own with triton's interpreter: see
``tests/kernels/gpu/test_interpreted.py``.
"""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 16 multiprocessors on which parts of 64 tokens are worth a program, so that small contexts
    are cut."""
    from holdfast.kernels.gpu import parts

    monkeypatch.setattr(parts, "multiprocessors", lambda device: 16)
    monkeypatch.setattr(parts, "SHORTEST", 64)
