"""The house: layers, the package list, what may stand nowhere. Reads the source, imports none of it."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("sdk", "kernels", "kvstore", "runtime", "sessions", "gateway", "benchmarks")
TOP_LEVEL = {*ROOMS, "tests", "pyproject.toml", "README.md"}
TOP_FILES = {"__init__.py", "py.typed", "constraints.txt", "Makefile", "LICENSE", ".gitignore", ".ci"}
TOP_FILES |= {"ARCHITECTURE.md", "CONTRIBUTING.md"}

# room -> rooms it may import (architecture §2)
LAYERS = {
    "sdk": set(),
    "kernels": set(),
    "kvstore": {"kernels"},
    "runtime": {"kernels", "kvstore"},
    "sessions": {"runtime", "kvstore"},
    "gateway": {"sessions", "runtime", "sdk"},
    "benchmarks": {"sdk", "kernels", "kvstore", "runtime", "sessions", "gateway"},
}
LAZY = {("gateway", "benchmarks")}  # the CLI's `holdfast bench`, by importlib
SDK_NEEDS = {"msgspec", "websockets", "anyio"}
ADAPTERS = {"sdk/adapters/mcp.py": {"mcp"}, "sdk/adapters/openai_agents.py": {"agents", "openai"}}
"""Each of these may need one package more, which is an extra."""


def tracked() -> list[Path]:
    """Files git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    return [Path(name) for name in listed if name and (ROOT / name).exists()]


def modules() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py" and path.parts[0] in ROOMS]


def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


def imported(path: Path) -> Iterator[str]:
    """Absolute dotted names this file imports, wherever in the file; relative ones resolved."""
    package = ["holdfast", *path.parts[:-1]]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = [*base, *(node.module.split(".") if node.module else [])]
            yield from (".".join([*stem, alias.name]) for alias in node.names)


def test_rooms_import_only_lower_floors() -> None:
    wrong = []
    for path in modules():
        room = path.parts[0]
        for name in imported(path):
            parts = name.split(".")
            if parts[0] != "holdfast" or len(parts) < 2 or parts[1] not in ROOMS or parts[1] == room:
                continue
            if parts[1] not in LAYERS[room] and (room, parts[1]) not in LAZY:
                wrong.append(f"{path} imports {name}")
    assert not wrong


COMPOSING = {("gateway", "cli"), ("gateway", "embedded.py")}


def test_gateway_takes_only_frames_from_the_sdk_client_side() -> None:
    """The gateway composes clients for its CLI, demo and embedded engine; its server knows frames only."""
    wrong = [
        f"{path} imports {name}"
        for path in modules()
        if path.parts[:2] not in COMPOSING and path.parts[0] == "gateway"
        for name in imported(path)
        if name.startswith("holdfast.sdk.")
        and not name.startswith(("holdfast.sdk.frames", "holdfast.sdk.errors"))
    ]
    assert not wrong


def test_rooms_import_each_other_relatively() -> None:
    wrong = [
        str(path)
        for path in modules()
        if path.parts[0] != "benchmarks"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("holdfast")
    ]
    assert not wrong


def test_sdk_needs_no_engine() -> None:
    wrong = []
    for path in modules():
        if path.parts[0] != "sdk":
            continue
        for name in imported(path):
            top = name.split(".")[0]
            needs = SDK_NEEDS | {"holdfast"} | ADAPTERS.get(str(path), set())
            if top not in needs and top not in sys.stdlib_module_names:
                wrong.append(f"{path} imports {name}")
    assert not wrong


def test_every_package_is_listed() -> None:
    """An editable install hides a missing one; the wheel would not have it."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {".".join(["holdfast", *path.parts[:-1]]) for path in modules()}
    assert listed == found | {"holdfast"}


def test_the_top_level_is_fixed() -> None:
    found = {path.parts[0] for path in tracked()}
    assert found <= TOP_LEVEL | TOP_FILES, sorted(found - TOP_LEVEL - TOP_FILES)
    assert found >= TOP_LEVEL


def test_modules_say_what_they_hold() -> None:
    assert not [str(path) for path in modules() if not ast.get_docstring(tree_of(path))]


def test_door_plates_are_docstrings_only() -> None:
    wrong = [
        str(path)
        for path in modules()
        if path.name == "__init__.py"
        and len(path.parts) == 2
        and path.parts[0] != "sdk"
        and len(tree_of(path).body) != 1
    ]
    assert not wrong


@pytest.mark.parametrize(
    "words",
    [
        ("TODO", "FIXME", "XXX", "NotImplementedError"),
        ("import pickle", "torch.load(", "multiprocessing.shared_memory", "import marshal"),
        ("files.pythonhosted", "/root/", "/work/", "/opt/"),
    ],
    ids=["unfinished", "unsafe", "this machine"],
)
def test_words_that_stand_nowhere(words: tuple[str, ...]) -> None:
    ours = {Path("tests/test_house.py")}
    texts = [
        path
        for path in tracked()
        if path.suffix in {".py", ".md", ".toml", ".txt"} or path.name == "Makefile"
    ]
    wrong = [
        f"{path}: {word}"
        for path in texts
        if path not in ours
        for word in words
        if word in (ROOT / path).read_text(errors="replace")
    ]
    assert not wrong
