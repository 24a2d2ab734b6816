"""``make gpu`` without a GPU: it says so and measures nothing; every part runs, interpreted, at toy sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_gpu_nothing_is_measured() -> None:
    ran = run()
    assert ran.returncode == 0
    assert ran.stdout.startswith("no CUDA device") and len(ran.stdout.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_part_is_rehearsed() -> None:
    ran = run("--rehearse")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for part in ("ceilings", "correct", "decode", "prefill", "prefix", "rows", "draw", "invariant", "agent"):
        assert f"\n{part} " in "\n" + ran.stdout, ran.stdout
    assert "carry the wheels" not in ran.stdout, ran.stdout
    assert "NOT MEASURED" not in ran.stdout and "missed" not in ran.stdout, ran.stdout
