"""Programs where OpenMP does not start as many threads as they are cut for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

SCRIPT = """
import time
import torch
torch.set_num_threads(2)
from holdfast.kernels.cpu import backend
from holdfast.kernels.cpu.compiling import join_torch
from holdfast.kernels.packed import plain
join_torch()
backend.parts_for = lambda work, grain: 2
x, weight = torch.randn(9, 64), torch.randn(80, 64)
for _ in range(50):
    out = backend.packed_linear(x, plain(weight))
    assert torch.allclose(out, x @ weight.T, atol=1e-4)
"""


@pytest.mark.parametrize("setting", ["OMP_THREAD_LIMIT=1", "OMP_DYNAMIC=true", ""])
def test_a_program_ends_on_however_many_threads(setting: str) -> None:
    """Its parts wait for one another; where they run one after the other, one of them does all."""
    name, _, value = setting.partition("=")
    told = {key: its for key, its in os.environ.items() if not key.startswith("OMP_")}
    told |= {"NUMBA_NUM_THREADS": "2", **({name: value} if name else {})}
    subprocess.run([sys.executable, "-c", SCRIPT], env=told, check=True, timeout=250)
