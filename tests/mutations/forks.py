"""Bugs planted, and the tests that must catch them run, each in a fork of one process that has imported what
takes long: torch alone takes longer than most of these tests. None of our modules is imported before a fork.

A program. A run is a line at stdin: ``{"name": …, "where": folder, "tests": [node ids], "bug": null}``, or as
bug ``[file, old, new]``. Two run at a time; the end of each is a line at stdout, ``{"name": …, "code": …}``.
The source is copied into ``where``, and what pytest says stands there in ``said``.
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
COPIED = ("kernels", "kvstore", "runtime", "sessions", "tests")
AT_ONCE = 2
CI = ("CI", "BUILD_NUMBER")
"""Where one is set pytest tells a failed comparison in full: a diff of random bytes, which takes minutes."""
PLUGINS = ("anyio.pytest_plugin", "pytest_timeout", "_hypothesis_pytestplugin")
"""Those of pytest that the tests need, by their modules; to look for others takes as long as many a test."""
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
    "xml.etree.ElementTree",
    *PLUGINS,
)
# Plugins are imported before pytest could rewrite their asserts. A limit that raises in the test itself breaks
# pytest where that comes in a loop's jump back, which has no line in Python 3.11; the thread ends the fork.
OPTIONS = (
    "-q -x -p no:cacheprovider --timeout 60 --timeout-method thread"
    " -W ignore::pytest.PytestAssertRewriteWarning"
)


def main() -> None:
    """Until stdin ends, and all runs have."""
    for name in CI:
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in HEAVY:
        importlib.import_module(name)
    gc.freeze()  # no fork walks, or writes into, what it shares with all
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
    """Wait for one that runs to end, and say how."""
    pid, status = os.wait()
    print(json.dumps({"name": running.pop(pid), "code": os.waitstatus_to_exitcode(status)}), flush=True)


def become(run: dict[str, Any]) -> None:
    """This fork is a run of its own from now on, and ends with it."""
    code = -1
    try:
        where = Path(run["where"])
        speak_into(where / "said")
        house = copied(where, run["bug"])
        os.chdir(house)
        sys.path.insert(0, str(where))
        os.environ["PYTHONPATH"] = str(where)
        # A folder of its own: runs that share one clean it up behind each other's backs.
        plugins = [word for name in PLUGINS for word in ("-p", name)]
        code = pytest.main([*OPTIONS.split(), *plugins, f"--basetemp={where / 'tmp'}", *run["tests"]])
    except BaseException:
        traceback.print_exc()  # nobody above would say it
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def speak_into(path: Path) -> None:
    """Output goes there, and there is no input."""
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
        assert source.count(old) == 1, f"{source.count(old)} such places in {file}"
        (house / file).write_text(source.replace(old, new))
        for stale in (house / file).parent.glob(f"__pycache__/{Path(file).stem}.*"):
            stale.unlink()
    return house


def copy(source: str, target: str) -> None:
    """Code is copied with its times, so that its bytecode holds; models and the like are only linked."""
    if source.endswith((".py", ".pyc")):
        shutil.copy2(source, target)
    else:
        os.symlink(source, target)


if __name__ == "__main__":
    main()
