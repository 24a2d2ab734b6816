"""``make gpu`` without a GPU: it says so and measures nothing; every part runs, interpreted, at toy sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from holdfast.benchmarks.gpu.run import BY_NAME, PARTS, WHOLE

ROOT = Path(__file__).parents[2]


REHEARSED = [part for part in PARTS if part not in (*WHOLE, *BY_NAME)]
COMMAND = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py")]


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return own | {"OMP_NUM_THREADS": "1"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_gpu_nothing_is_measured() -> None:
    ran = run()
    assert ran.returncode == 0
    assert ran.stdout.startswith("no CUDA device") and len(ran.stdout.splitlines()) == 1


@pytest.mark.timeout(300)
def test_a_call_that_is_killed_goes_on_where_it_stood(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    words = ["--rehearse", "--results", str(results), "--part", "ceilings", "--part", "rows"]
    with subprocess.Popen([*COMMAND, *words], env=environment(), stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline().startswith("ceilings ")
        first.kill()
    ran = run(*words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "failed: none; left: none" in ran.stdout
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert Counter(line["part"] for line in lines if line["state"] == "ended") == {"ceilings": 1, "rows": 1}
    assert all(line["figures"] and not line["failure"] for line in lines if line["state"] == "ended")
    size = results.stat().st_size
    assert "before        ceilings, rows" in run(*words).stdout and results.stat().st_size == size


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_part_is_rehearsed() -> None:
    ran = run("--rehearse")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for part in REHEARSED:
        assert f"\n{part} " in "\n" + ran.stdout, ran.stdout
    assert "carry the wheels" not in ran.stdout, ran.stdout
    assert "NOT MEASURED" not in ran.stdout and "missed" not in ran.stdout, ran.stdout
