"""The Triton kernels without a GPU: the files under ``interpreted`` run in a process with triton's interpreter.

Triton decides when it is imported, and for good, whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parents[1] / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@dataclass
class Ran:
    """Of each file: how many of its tests ran, and what the failed ones said; of all, what pytest said."""

    said: str
    passed: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)


def run(names: list[str], marks: str, report: Path) -> Ran:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks]
    hidden = {name for name in os.environ if name.startswith("PYTEST_")}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    paths = [str(FOLDER / name) for name in names]
    done = subprocess.run(
        [*command, f"--junitxml={report}", *paths],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    ran = Ran(done.stdout + done.stderr)
    assert report.exists(), ran.said
    for case in ElementTree.parse(report).iter("testcase"):
        name = next(part for part in case.attrib["classname"].split(".") if part.startswith("test_")) + ".py"
        wrong = [one.text or "" for one in case if one.tag in ("failure", "error")]
        if wrong:
            ran.failed[name] = ran.failed.get(name, "") + "".join(wrong)
        elif not list(case.iter("skipped")):
            ran.passed[name] += 1
    return ran


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All files in one process: importing torch and triton takes longer than some of them."""
    return run(FILES, "not slow and not gpu", tmp_path_factory.mktemp("interpreted") / "report.xml")


@pytest.mark.timeout(900)  # the first waits for all of them, on machines that others use too
@pytest.mark.parametrize("name", FILES)
def test_kernels_equal_their_references(name: str, interpreted: Ran) -> None:
    assert name not in interpreted.failed, interpreted.failed[name]
    assert interpreted.passed[name], interpreted.said


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in FILES if "mark.slow" in (FOLDER / name).read_text()])
def test_kernels_on_many_drawn_batches(name: str, tmp_path: Path) -> None:
    ran = run([name], "slow", tmp_path / "report.xml")
    assert ran.passed[name] and not ran.failed, ran.said
