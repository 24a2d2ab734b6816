"""Tests the tests: each bug of ``planted.toml`` must make its test fail.

Each bug is planted alone in a copy of the source, and its test runs there in a process of its own. Without a
bug all these tests pass. ``forks.py`` runs them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

FAILED = 1
"""Pytest's exit code for tests that ran and failed; broken imports and unknown tests have others."""
SOUND = ""

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Bug:
    """``old`` in ``file`` becomes ``new``; ``test``, a node id, must then fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


BUGS = [Bug(**bug) for bug in tomllib.loads(Path(__file__).with_name("planted.toml").read_text())["bug"]]

BROKEN = Bug(
    "broken",
    "kvstore/__init__.py",
    '"""Room kvstore',
    'raise RuntimeError\n"""Room kvstore',
    "tests/runtime/scheduler/test_verbs.py",
)
LOOKING = Bug(
    "looking",
    "tests/kvstore/test_keychain.py",
    "from __future__ import annotations\n",
    "from __future__ import annotations\nimport os\nassert not {'CI', 'BUILD_NUMBER'} & set(os.environ)\n",
    "tests/kvstore/test_keychain.py",
)
"""Not bugs: these check how the runs are made."""


class Runs:
    """One run per bug, in their order, and one without a bug."""

    def __init__(self, folder: Path, bugs: Iterable[Bug]) -> None:
        self._folder = folder
        self._codes: dict[str, int] = {}
        self._names: dict[str, Path] = {}
        lines = [self._line(SOUND, sorted({bug.test for bug in bugs}), None)]
        lines += [self._line(bug.name, [bug.test], (bug.file, bug.old, bug.new)) for bug in bugs]
        orders = folder / "orders"
        orders.write_text("\n".join(lines))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOLDFAST_EXAMPLES": "3"}
        environment |= {"HOLDFAST_NO_SHRINK": "1", "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"CI": "true", "BUILD_NUMBER": "1"}
        with orders.open() as stdin:
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("forks.py")],
                stdin=stdin,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
                start_new_session=True,
            )

    def _line(self, name: str, tests: list[str], bug: tuple[str, str, str] | None) -> str:
        where = self._names[name] = self._folder / str(len(self._names))
        where.mkdir()
        return json.dumps({"name": name, "where": str(where), "tests": tests, "bug": bug})

    def ended(self, name: str) -> tuple[int, str]:
        """Wait for a run; its exit code and output."""
        assert self._process.stdout is not None
        while name not in self._codes:
            line = self._process.stdout.readline()
            assert line, "the process of the runs has ended"
            end = json.loads(line)
            self._codes[end["name"]] = end["code"]
        return self._codes[name], (self._names[name] / "said").read_text()

    def close(self) -> None:
        """End all runs."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("planted"), [BROKEN, LOOKING, *BUGS])
    yield runs
    runs.close()


@pytest.mark.timeout(1200)  # it waits for all these tests, one after another
def test_without_a_bug_all_pass_in_the_copy(runs: Runs) -> None:
    code, said = runs.ended(SOUND)
    assert code == 0, said


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_bug_is_caught(bug: Bug, runs: Runs) -> None:
    code, said = runs.ended(bug.name)
    assert code == FAILED, f"{bug.test} did not catch it:\n{said}"


def test_the_copy_is_what_runs(runs: Runs) -> None:
    """The copy is imported, not the editable install."""
    code, said = runs.ended(BROKEN.name)
    assert code not in (0, FAILED) and "RuntimeError" in said


def test_no_run_knows_that_it_is_one_of_ci(runs: Runs) -> None:
    """In CI mode pytest prints a failed comparison in full."""
    code, said = runs.ended(LOOKING.name)
    assert code == 0, said
