"""The room's bookkeeping runs where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import holdfast.kvstore

BLOCK_TORCH = """
import importlib, sys
sys.modules["torch"] = None
for name in sys.argv[1:]:
    importlib.import_module("holdfast.kvstore." + name)
from holdfast.kvstore.pool import BlockPool
pool = BlockPool(4)
pool.release(pool.allocate(4).blocks)
assert not any(pool.audit_in_slices([]))
"""


def run(*modules: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK_TORCH, *modules]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


TORCH = {"arena", "block_mover"}


def test_only_arena_and_block_mover_need_torch() -> None:
    [folder] = holdfast.kvstore.__path__
    paths = (path.relative_to(folder).with_suffix("") for path in Path(folder).rglob("*.py"))
    names = sorted(
        ".".join(path.parts) for path in paths if path.stem not in {"__init__", "__main__", *TORCH}
    )
    assert {
        "pool",
        "prefix_index",
        "keys",
        "block_table",
        "eviction",
        "groups",
        "host.tier",
        "host.slots",
    } <= set(names)
    done = run(*names)
    assert done.returncode == 0, done.stderr


def test_the_arena_does() -> None:
    """So that the test above would notice."""
    done = run("arena")
    assert done.returncode == 1
    assert "import of torch halted" in done.stderr
