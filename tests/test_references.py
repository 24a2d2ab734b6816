"""What the source and the documents name is there: modules, what is taken from them, files, tests, commands.

A name in an import inside a function, or in a string, fails only when that line runs; some lines run only on a
machine with a GPU, or when an operator types them. Reads the source, imports none of it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from holdfast.tests import conftest
from holdfast.tests.test_house import ROOMS, ROOT, names_in, tracked, tree_of

FOLDERS = "|".join((*ROOMS, "tests"))
FILE = re.compile(
    rf"(?<![\w./~-])((?:{FOLDERS}|\.ci)/(?:[\w.-]+/)*(?:[\w-]+\.(?:c|json|md|mjs|py|toml|txt|yaml))?)"
    r"(?![\w/.-]*\w)(?:::(\w+))?"
)
"""A file or folder of the repository, ``tests/kernels/`` or ``kvstore/pool.py``, perhaps with a test."""
BARE = re.compile(r"`([\w-]+\.py)`")
ROW = re.compile(r"^\| `([\w-]+)/` \|(.*)$", re.MULTILINE)
NAMED = re.compile(r"`((?:[\w-]+/)*[\w-]+(?:\.py|\.md|/))`")
LINK = re.compile(r"\]\(((?!https?:)[^)#\s]+)")
EXAMPLES = {"runtime/order/mine.py", "gateway/NAME/", "benchmarks/NAME.py", "benchmarks/NAME/bench.py"}
EXAMPLES |= {"holdfast.runtime.order.mine", "holdfast.sdk.examples.NAME"}
"""What a document tells its readers to write, and patterns of names."""
DOTTED = re.compile(rf"(?<![\w.])holdfast\.(?:{FOLDERS})(?:\.\w+)*(?::\w+)?")
COMMAND = re.compile(r"(?:`|^ *\$ |^ {4})(make|holdfast bench) ([a-z][\w-]*)", re.MULTILINE)


@cache
def sources() -> dict[str, Path]:
    """The path of each Python module, by its name."""
    paths = [path for path in tracked() if path.suffix == ".py"]
    return {
        ".".join(["holdfast", *path.with_suffix("").parts]).removesuffix(".__init__"): path for path in paths
    }


@cache
def bound(module: str) -> frozenset[str]:
    """The names that a module binds outside its functions and classes, and its submodules."""
    found = {"__doc__", "__file__", "__name__", "__package__", "__path__"}
    found |= {name.removeprefix(f"{module}.") for name in sources() if name.startswith(f"{module}.")}
    left: list[ast.AST] = [tree_of(sources()[module])]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        left += ast.iter_child_nodes(node)
    return frozenset(found)


def leads(dotted: str) -> bool:
    """Whether a dotted name, ``holdfast.kvstore.pool`` or ``holdfast.kvstore.pool.BlockPool``, is there."""
    stem, _, name = dotted.rpartition(".")
    return dotted in sources() or (stem in sources() and name in bound(stem))


def taken(path: Path) -> Iterator[tuple[int, str]]:
    """Each name of ours that a module imports, wherever in it, with the line; and each that it takes from an
    imported module by a dot."""
    aliases: dict[str, str] = {}
    others: set[str] = set()
    dots: list[tuple[str, ast.Attribute]] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for (stem, name), alias in zip(names_in(path, node), node.names, strict=True):
                full = f"{stem}.{name}" if name else stem
                if full.startswith("holdfast."):
                    yield node.lineno, full
                if full in sources() and (name or alias.asname):
                    aliases[alias.asname or alias.name] = full
                else:
                    others.add(alias.asname or alias.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            dots.append((node.value.id, node))
        elif isinstance(node, ast.arg):
            others.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            others.add(node.id)
    for name, node in dots:
        if name in aliases and name not in others and isinstance(node.ctx, ast.Load):
            yield node.lineno, f"{aliases[name]}.{node.attr}"


def test_what_is_imported_is_there() -> None:
    """Also by tests that are skipped here, and in functions that do not run here."""
    wrong = [
        f"{path}:{line}: {name}"
        for path in sources().values()
        for line, name in taken(path)
        if not leads(name)
    ]
    assert not wrong


@cache
def texts() -> dict[Path, str]:
    """All files that people or programs read, but data."""
    found = {}
    for path in tracked():
        if path.parts[:2] != ("benchmarks", "results") and "published" not in path.parts:
            try:
                found[path] = (ROOT / path).read_text()
            except UnicodeDecodeError:
                continue
    return found


def test_modules_that_texts_name_are_there() -> None:
    """In strings, in documents, behind ``python -m`` in the Makefile."""
    wrong = [
        f"{path}: {name}"
        for path, text in texts().items()
        for name in DOTTED.findall(text)
        if name not in EXAMPLES and not leads(name.replace(":", "."))
    ]
    assert not wrong


def test_files_that_texts_name_are_there() -> None:
    """And the tests behind ``::``: in documents, in the table of planted bugs, in comments."""
    wrong = []
    for path, text in texts().items():
        for name, test in FILE.findall(text):
            there = next((one for one in (ROOT / name, (ROOT / path).parent / name) if one.exists()), None)
            if name not in EXAMPLES and (there is None or (test and f"def {test}(" not in there.read_text())):
                wrong.append(f"{path}: {name}{'::' * bool(test)}{test}")
    assert not wrong


def test_files_that_documents_name_without_their_folder_are_there() -> None:
    """Anywhere; in a row of a table that begins with a folder, in that folder or as a path from the root."""
    known = {path.name for path in tracked()} | {Path(example).name for example in EXAMPLES}
    wrong = []
    for path, text in texts().items():
        if path.suffix != ".md":
            continue
        wrong += [f"{path}: {name}" for name in BARE.findall(text) if name not in known]
        for folder, cells in ROW.findall(text):
            cell_folder = ROOT / path.parent / folder
            names = NAMED.findall(cells) if cell_folder.is_dir() else ()
            gone = (name for name in names if not any((one / name).exists() for one in (cell_folder, ROOT)))
            wrong += [f"{path}: {folder}/{name}" for name in gone]
    assert not wrong


def test_links_of_documents_lead_somewhere() -> None:
    wrong = [
        f"{path}: {link}"
        for path, text in texts().items()
        for link in (LINK.findall(text) if path.suffix == ".md" else ())
        if not (ROOT / path.parent / link).exists()
    ]
    assert not wrong


def test_the_longest_tests_are_there() -> None:
    assert all((ROOT / name).exists() for name in conftest.LONGEST)


def file_named(node: ast.AST, known: dict[str, Path], here: Path) -> Path | None:
    """The path that an expression of constants gives, from ``__file__`` on: ``ROOT / "tests" / "conftest.py"``.
    None for any other expression. ``known``: the paths of names."""
    match node:
        case ast.Call(func=ast.Name(id="Path"), args=[ast.Name(id="__file__")]):
            return here
        case ast.Name(id=name):
            return known.get(name)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=str(name))):
            folder = file_named(left, known, here)
            return None if folder is None else folder / name
        case ast.Call(func=ast.Attribute(value=of, attr="resolve"), args=[]):
            return file_named(of, known, here)
        case ast.Call(func=ast.Attribute(value=of, attr="with_name"), args=[ast.Constant(value=str(name))]):
            beside = file_named(of, known, here)
            return None if beside is None else beside.with_name(name)
        case ast.Attribute(value=of, attr="parent"):
            below = file_named(of, known, here)
            return None if below is None else below.parent
        case ast.Subscript(value=ast.Attribute(value=of, attr="parents"), slice=ast.Constant(value=int(up))):
            below = file_named(of, known, here)
            return None if below is None else below.parents[up]
    return None


def test_files_that_code_puts_together_are_there() -> None:
    """But those that git ignores, which are made."""
    named: dict[Path, str] = {}
    for path in sources().values():
        if "__file__" not in texts()[path]:
            continue
        known: dict[str, Path] = {}
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    found = file_named(value, known, ROOT / path)
                    known |= {} if found is None else {name: found}
        for node in ast.walk(tree_of(path)):
            found = file_named(node, known, ROOT / path)
            if found is not None:
                named.setdefault(found, f"{path}: {found.relative_to(ROOT)}")
    assert len(named) > 50
    gone = [str(found) for found in named if not found.exists()]
    asked = [*gone, *(f"{one}/" for one in gone)]
    made = subprocess.run(
        ["git", "check-ignore", *asked], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert not [named[Path(one)] for one in gone if not {one, f"{one}/"} & set(made.stdout.splitlines())]


def test_commands_that_documents_tell_are_there() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for path, text in texts().items():
        for command, name in COMMAND.findall(text) if path.suffix == ".md" else ():
            benches = (f"benchmarks/{name}.py", f"benchmarks/{name}/bench.py")
            if (
                name not in targets
                if command == "make"
                else not any((ROOT / one).exists() for one in benches)
            ):
                wrong.append(f"{path}: {command} {name}")
    assert not wrong
