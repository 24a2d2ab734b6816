"""After the rehearsal no step compiles anything, whatever its rows are: it would stall everyone for seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_steps_compile_nothing_after_the_rehearsal(steps: int) -> None:
    """In a process of its own: triton's driver is a global."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(ROOT / "build" / "triton")}
    environment.pop("TRITON_INTERPRET", None)
    program = str(Path(__file__).parents[1] / "compile_closure.py")
    ran = subprocess.run(
        [sys.executable, program, "--steps", str(steps)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = json.loads(ran.stdout)
    assert not said["behind"]
    usual = {"decode_stretch", "extend_tile", "copy_runs", "pick_tokens", "penalize_counted"}
    assert usual | {"quantised_tile", "sum_splits"} <= set(said["ahead"])
