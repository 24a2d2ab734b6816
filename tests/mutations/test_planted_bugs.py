"""A test that passes with a known bug in the code is not a test: each bug of ``planted.toml`` must be caught.

Each is planted alone, in a copy of the source, where its test runs in a process of its own and has to fail;
without any bug all those tests pass there. Two run at a time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = ("kernels", "kvstore", "runtime", "sessions", "tests")
FAILED = 1
"""Pytest's exit code for tests that ran and failed; broken imports and unknown tests have others."""

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Bug:
    """``old`` in ``file`` becomes ``new``; ``test``, one or several node ids, must then fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


BUGS = [Bug(**bug) for bug in tomllib.loads(Path(__file__).with_name("planted.toml").read_text())["bug"]]


def run_in_copy(where: Path, tests: list[str], bug: Bug | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``tests`` on a copy of the source under ``where``, with ``bug`` planted."""
    house = where / "holdfast"
    for name in COPIED:
        shutil.copytree(
            ROOT / name, house / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors")
        )
    for name in ("__init__.py", "pyproject.toml"):
        shutil.copy(ROOT / name, house)
    if bug is not None:
        source = (house / bug.file).read_text()
        assert source.count(bug.old) == 1, f"{bug.name}: {source.count(bug.old)} such places in {bug.file}"
        (house / bug.file).write_text(source.replace(bug.old, bug.new))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "60",
        *tests,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(where),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HOLDFAST_EXAMPLES": "1",
        "HOLDFAST_NO_SHRINK": "1",
    }
    return subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """A run for each bug, begun in their order, and one without any."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        every = sorted({bug.test for bug in BUGS})
        runs = {"": pool.submit(run_in_copy, tmp_path_factory.mktemp("sound"), every)}
        for bug in BUGS:
            runs[bug.name] = pool.submit(run_in_copy, tmp_path_factory.mktemp("bug"), [bug.test], bug)
        yield runs
        pool.shutdown(cancel_futures=True)


def test_without_a_bug_all_pass_in_the_copy(
    runs: dict[str, Future[subprocess.CompletedProcess[str]]],
) -> None:
    run = runs[""].result()
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_bug_is_caught(bug: Bug, runs: dict[str, Future[subprocess.CompletedProcess[str]]]) -> None:
    run = runs[bug.name].result()
    assert run.returncode == FAILED, f"{bug.test} did not catch it:\n{run.stdout}{run.stderr}"


def test_the_copy_is_what_runs(tmp_path: Path) -> None:
    """The editable install must not answer for the copy."""
    bug = Bug(
        "broken door plate",
        "kvstore/__init__.py",
        '"""Room kvstore',
        'raise RuntimeError\n"""Room kvstore',
        "",
    )
    run = run_in_copy(tmp_path, ["tests/runtime/test_verbs.py"], bug)
    assert run.returncode not in (0, FAILED) and "RuntimeError" in run.stdout
