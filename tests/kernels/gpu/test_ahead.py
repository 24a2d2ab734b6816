"""Kernels compiled for GPUs that are not present: no spills, shared memory in bounds, tensor cores where meant.

Triton keeps what it compiled under ``build/triton``, by the hash of the source; the first run is the long one.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from holdfast.kernels.gpu import configurations, quantised, support
from holdfast.kernels.gpu.launches import all_launches

ROOT = Path(__file__).parents[3]
LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
UNITS = {80: "mma.sync", 90: "wgmma.mma", 100: "tcgen05.mma"}
HOT = {
    80: ("decode qwen3-0.6b",),
    90: ("decode qwen3-0.6b", "extend qwen3-0.6b", "store qwen3-0.6b"),
    100: ("extend qwen3-0.6b",),
}


TELLS = """
import json, threading
from holdfast.kernels.backends import tell_compiling
from holdfast.kernels.gpu.ahead import compile_all
told = []
tell_compiling(told.append, lambda: told.append("ended"))
kernels = [one.kernel for _ in range(2) for _, some in compile_all(90, ["store qwen3-0.6b"]) for one in some]
another = threading.Thread(target=lambda: list(compile_all(80, ["store qwen3-0.6b"])))
another.start()
another.join()
print(json.dumps([kernels, told]))
"""


def compiled(folder: Path, arch: int, *names: str) -> list[dict[str, Any]]:
    """The table that compiling for ``arch`` gives, in a process of its own: triton's driver is a global."""
    only = [word for name in names for word in ("--only", name)]
    table = folder / "table.json"
    command = [sys.executable, "-m", "holdfast.kernels.gpu.ahead", "--arch", str(arch), "--json", str(table)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(ROOT / "build" / "triton")}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run([*command, *only], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    loaded: list[dict[str, Any]] = json.loads(table.read_text())
    return loaded


def check(table: list[dict[str, Any]], arch: int) -> None:
    for one in table:
        assert one["shared"] <= LIMITS[arch], one
        if one["kernel"] in ("decode_stretch", "extend_tile", "extend_stretch"):
            assert one["stack"] == 0, one
        if one["kernel"] == "decode_stretch":
            assert one["tensor_cores"] == "mma.sync", one  # 16 rows: too few for a warpgroup
        wide = ("extend_tile", "extend_stretch", "product_tile")
        if one["kernel"] in wide and "32" not in one["launch"].split()[-1]:
            assert one["tensor_cores"] == UNITS[arch], one


@pytest.mark.timeout(600)
def test_compiling_is_reported_once_before_and_after_and_for_one_thread() -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(ROOT / "build" / "triton")}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(
        [sys.executable, "-c", TELLS], env=environment, capture_output=True, text=True, check=True
    )
    kernels, told = json.loads(ran.stdout)
    assert told == [word for kernel in kernels for word in (kernel, "ended")] and kernels


def launched(path: Path) -> set[str]:
    """The kernels of a file that it launches: ``name[grid](...)``."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    kernels = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.decorator_list}
    called = [
        node.func.value
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    return kernels & {name.id for name in called if isinstance(name, ast.Name)}


def test_every_kernel_has_a_launch_to_compile_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    made = set[str]()
    for module in (configurations, quantised, support):
        monkeypatch.setattr(module, "architecture", lambda device: 90)
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: made.add(kernel.fn.__name__))
    for _, launch in all_launches(torch.device("meta")):
        launch()
    every = set[str]().union(*map(launched, (ROOT / "kernels" / "gpu").glob("*.py")))
    assert made == every and len(made) > 10


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", LIMITS)
def test_the_hottest_launches_compile(arch: int, tmp_path: Path) -> None:
    table = compiled(tmp_path, arch, *HOT[arch])
    assert len(table) >= len(HOT[arch])
    check(table, arch)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", LIMITS)
def test_every_launch_compiles(arch: int, tmp_path: Path) -> None:
    table = compiled(tmp_path, arch)
    assert len(table) >= 50
    check(table, arch)
