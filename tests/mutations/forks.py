"""Runs tests with a planted bug, each run in a fork of one process that has imported the slow packages: torch
alone takes longer than most of these tests. None of our modules is imported before a fork.

This is a program. A run is a line on stdin: ``{"name": …, "where": folder, "tests": [node ids], "bug": null}``,
where a bug is ``[file, old, new]``. Two run at a time; the end of each is a line on stdout, ``{"name": …,
"code": …}``. The source is copied into ``where``; pytest's output is in its file ``said``.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = ("gateway", "kernels", "kvstore", "runtime", "sdk", "sessions", "tests")
AT_ONCE = 2
CI = ("CI", "BUILD_NUMBER")
"""If one is set, pytest prints a failed comparison in full: a diff of random bytes, which takes minutes."""
PLUGINS = ("anyio.pytest_plugin", "pytest_timeout", "_hypothesis_pytestplugin")
"""Modules of the pytest plugins that the tests need; searching for others takes as long as a test."""
HEAVY = (
    "torch",
    "numba",
    "hypothesis.stateful",
    "anyio._backends._asyncio",
    "msgspec",
    "tokenizers",
    "xxhash",
)
HEAVY += (
    "lmdb",
    "regex",
    "jinja2",
    "transformers.utils.chat_template_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "xml.etree.ElementTree",
    *PLUGINS,
)
# Plugins are imported before pytest can rewrite their asserts. A time limit that raises in the test breaks
# pytest at a loop's jump back, which has no line in Python 3.11; the timeout thread ends the fork instead.
OPTIONS = (
    "-q -x -p no:cacheprovider -o timeout=20 --timeout-method thread"  # times HOLDFAST_EXAMPLES
    " -W ignore::pytest.PytestAssertRewriteWarning"
)


def main() -> None:
    """Run until stdin has ended and all runs have."""
    for name in CI:
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in HEAVY:
        importlib.import_module(name)
    gc.freeze()  # so that forks do not copy the shared objects
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not live on in a fork"
    assert "holdfast" not in sys.modules, "forks would have it too, instead of their copy"
    running: dict[int, str] = {}
    for run in map(json.loads, sys.stdin):
        if len(running) == AT_ONCE:
            tell(running)
        if (pid := os.fork()) == 0:
            become(run)
        running[pid] = run["name"]
    while running:
        tell(running)


def tell(running: dict[int, str]) -> None:
    """Wait until a run ends, and print its code."""
    pid, status = os.wait()
    print(json.dumps({"name": running.pop(pid), "code": os.waitstatus_to_exitcode(status)}), flush=True)


def become(run: dict[str, Any]) -> None:
    """Turn this fork into a run, and end with it."""
    code = -1
    try:
        where = Path(run["where"])
        speak_into(where / "said")
        house = copied(where, run["bug"])
        os.chdir(house)
        sys.path.insert(0, str(where))
        os.environ["PYTHONPATH"] = str(where)
        # A folder of its own: runs that share one delete each other's files.
        plugins = [word for name in PLUGINS for word in ("-p", name)]
        code = pytest.main([*OPTIONS.split(), *plugins, f"--basetemp={where / 'tmp'}", *run["tests"]])
    except BaseException:
        traceback.print_exc()  # nothing above prints it
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def speak_into(path: Path) -> None:
    """Redirect output to ``path`` and input to nothing."""
    said = os.open(path, os.O_WRONLY | os.O_CREAT)
    for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), said, said)):
        os.dup2(source, number)


def copied(where: Path, bug: list[str] | None) -> Path:
    """A copy of the source, with its bytecode, and ``bug`` planted in it."""
    house = where / "holdfast"
    for name in COPIED:
        shutil.copytree(
            ROOT / name, house / name, ignore=shutil.ignore_patterns("numba-*"), copy_function=copy
        )
    for name in ("__init__.py", "pyproject.toml"):
        shutil.copy2(ROOT / name, house)
    if bug is not None:
        file, old, new = bug
        source = (house / file).read_text()
        assert source.count(old) == 1, f"{source.count(old)} such texts in {file}"
        (house / file).unlink()  # its text is the checkout's, too
        (house / file).write_text(source.replace(old, new))
        for stale in (house / file).parent.glob(f"__pycache__/{Path(file).stem}.*"):
            stale.unlink()
    return house


def copy(source: str, target: str) -> None:
    """Link code by another name, or copy it with its times, so that its bytecode is valid and it stands in the
    copy; other files may stand where they are."""
    if not source.endswith((".py", ".pyc")):
        os.symlink(source, target)
        return
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


if __name__ == "__main__":
    main()
