"""These run in a process of their own with triton's interpreter: see
``tests/kernels/gpu/test_interpreted.py``.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 16 multiprocessors on which parts of 64 tokens are worth a program, so that small contexts
    are cut."""
    from holdfast.kernels.gpu import parts

    monkeypatch.setattr(parts, "multiprocessors", lambda device: 16)
    monkeypatch.setattr(parts, "SHORTEST", 64)


@pytest.fixture
def _rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's product is summed in one order for all of its rows, as a GPU does; the interpreter leaves it to
    a BLAS, some of which (on some CPUs) sum a row by its place in the tile.
    """

    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(_: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_options: Any) -> TensorHandle:
        products = a.data.T[:, :, None].astype(d.data.dtype) * b.data[:, None, :]
        return TensorHandle(np.add.reduce(products, axis=0, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
