"""The Triton kernels without a GPU: each file under ``interpreted`` runs in a process whose triton interprets.

Triton decides when it is imported, and for good, whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


def run(name: str, marks: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks]
    hidden = {name for name in os.environ if name.startswith("PYTEST_")}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(FOLDER / name)], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(600)  # a whole file, on machines that others use too
@pytest.mark.parametrize("name", FILES)
def test_kernels_equal_their_references(name: str) -> None:
    ran = run(name, "not slow and not gpu")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in FILES if "mark.slow" in (FOLDER / name).read_text()])
def test_kernels_on_many_drawn_batches(name: str) -> None:
    ran = run(name, "slow")
    assert ran.returncode == 0, ran.stdout + ran.stderr
