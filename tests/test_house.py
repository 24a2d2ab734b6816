"""The house's rules: layers, packages, words that stand nowhere. Reads the source, imports none of it."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("sdk", "kernels", "kvstore", "runtime", "sessions", "gateway", "benchmarks")
DOCUMENTS = ("ARCHITECTURE.md", "CONTRIBUTING.md")
TOP_LEVEL = {*ROOMS, "tests", "pyproject.toml", "README.md"}
TOP_FILES = {
    "CHANGELOG.md",
    "__init__.py",
    "py.typed",
    "constraints.txt",
    "Makefile",
    "LICENSE",
    ".gitignore",
    ".ci",
}
TOP_FILES |= {*DOCUMENTS}

# room -> rooms it may import
LAYERS = {
    "sdk": set(),
    "kernels": set(),
    "kvstore": {"kernels"},
    "runtime": {"kernels", "kvstore"},
    "sessions": {"runtime", "kvstore"},
    "gateway": {"sessions", "runtime", "sdk"},
    "benchmarks": {"sdk", "kernels", "kvstore", "runtime", "sessions", "gateway"},
}
COMMON = {"holdfast.kvstore.log_lines", "holdfast.kvstore.options", "holdfast.kvstore.slices"}
"""Modules that all rooms above may import: every process of a server logs in one form, and settings declare
their options in one."""
LAZY = {("gateway", "benchmarks")}  # the CLI's `holdfast bench`, by importlib
SDK_NEEDS = {"msgspec", "websockets", "anyio"}
ADAPTERS = {"sdk/adapters/mcp.py": {"mcp"}, "sdk/adapters/openai_agents.py": {"agents", "openai"}}
"""Each of these may need one package more, which is an extra."""

FLOORS = 10
"""Modules on the longest chain of imports inside a room, at most."""
DOUBLED_CLASSES = 10
"""Class names that stand for more than one class, at most. Lower it with the number; never raise it."""

# room -> its files and packages, lowest first; those of one line import each other freely.
INSIDE = {
    "kvstore": [
        ["errors", "system_limits"],
        ["reserve", "folder_lock"],
        ["groups", "keys", "block_table", "priorities", "slices", "eviction"],
        ["quotas", "prefix_index", "arena"],
        ["pool", "host"],
        ["block_mover", "disk"],
    ],
    "runtime": [
        ["errors", "stats", "verbs"],
        ["adapters"],
        ["link.messages", "tokens", "model", "grammar.limits", "grammar.json_strings", "grammar.llguidance"],
        ["plan", "link.crash_report", "link.heartbeat"],
        ["link.child"],
        ["settings", "sequence", "link.engine_end"],
        ["order"],
        ["kv_placement", "execution", "grammar.queue"],
        ["scheduler"],
        ["engine"],
        ["build"],
        ["link"],
        ["thread", "__main__"],
    ],
    "sessions": [
        [
            "errors",
            "settings",
            "conversation.items",
            "token_ids",
            "workers",
            "journal.segment",
            "text.auto_tokenizer",
            "adapters",
        ],
        [
            "turn.events",
            "turn.cycles",
            "text.tokenizer",
            "text.detokenizer",
            "text.stop_strings",
            "text.streaming_tokenizer",
            "text.template_sandbox",
            "conversation.input_text_buffer",
        ],
        ["conversation.tree", "tools", "turn.request", "journal.records"],
        ["conversation.history", "engine_copy", "tenants", "conversation.continuation"],
        ["text"],
        ["turn.reply_reader"],
        ["journal", "conversation.edits", "placement"],
        ["fork_trees", "handles", "stored"],
        ["turn"],
        ["text.eager_prefill"],
        ["session"],
        ["exports"],
        ["registry"],
        ["forks"],
    ],
    "sdk": [
        ["errors"],
        ["frames"],
        ["connection.transport", "connection.responses", "tools", "params", "reading", "opening"],
        ["connection.multiplex", "connection.reconnect"],
        ["connection"],
        ["reply", "text_input"],
        ["turn"],
        ["agent"],
        ["chat"],
        ["client"],
        ["sync", "__init__"],
        ["adapters", "examples"],
    ],
    "gateway": [
        ["errors", "net.rates", "documents", "clients"],
        ["settings", "access.attribution", "metrics.turns"],
        [
            "net",
            "metrics.prometheus",
            "access.quotas",
            "access.auth",
            "access.rate_limits",
            "access.turn_queue",
        ],
        ["metrics.tracing"],
        ["access.tenants", "live.turns"],
        ["access.admission"],
        ["live.session"],
        ["live.sessions", "live.reply"],
        ["realtime", "live.transcripts"],
        ["service"],
        ["answers"],
        ["chat", "messages", "responses", "operator"],
        ["pages"],
        ["app"],
        ["server", "embedded"],
        ["batches"],
        ["offline"],
        ["cli"],
    ],
}


@cache
def tracked() -> list[Path]:
    """Files git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    return [Path(name) for name in dict.fromkeys(listed) if name and (ROOT / name).exists()]


def modules(*rooms: str) -> list[Path]:
    """Python files of these rooms, by default of all."""
    return [path for path in tracked() if path.suffix == ".py" and path.parts[0] in (rooms or ROOMS)]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


def names_in(path: Path, node: ast.stmt) -> Iterator[tuple[str, str]]:
    """The module that an import statement names, relative ones resolved, and each name taken from it, or ""."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = ["holdfast", *path.parts[:-1]]
        base = package[: len(package) - node.level + 1] if node.level else []
        stem = ".".join([*base, *(node.module.split(".") if node.module else [])])
        yield from ((stem, alias.name) for alias in node.names)


def imported(path: Path) -> Iterator[str]:
    """Absolute dotted names this file imports, wherever in the file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.stmt):
            yield from (f"{stem}.{name}" if name else stem for stem, name in names_in(path, node))


def test_rooms_import_only_lower_floors() -> None:
    wrong = []
    for path in modules():
        room = path.parts[0]
        for name in imported(path):
            parts = name.split(".")
            if ".".join(parts[:3]) in COMMON and room != "sdk":
                continue
            if parts[0] != "holdfast" or len(parts) < 2 or parts[1] not in ROOMS or parts[1] == room:
                continue
            if parts[1] not in LAYERS[room] and (room, parts[1]) not in LAZY:
                wrong.append(f"{path} imports {name}")
    assert not wrong


COMPOSING = {("gateway", "cli", name) for name in ("chat.py", "demo.py", "sessions.py", "terminal.py")}
COMPOSING |= {("gateway", "embedded.py"), ("gateway", "offline.py")}


def test_gateway_takes_only_frames_from_the_sdk_client_side() -> None:
    """The gateway composes clients for its CLI, demo and embedded engine; its server knows frames only."""
    wrong = [
        f"{path} imports {name}"
        for path in modules("gateway")
        if path.parts not in COMPOSING
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
    for path in modules("sdk"):
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


def test_a_rooms_init_is_a_docstring_only() -> None:
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
    wrong = [
        f"{path}: {word}"
        for path in texts()
        if path not in ours
        for word in words
        if word in (ROOT / path).read_text(errors="replace")
    ]
    assert not wrong


def texts() -> list[Path]:
    """Files that people read, but the licences of libraries."""
    return [
        path
        for path in tracked()
        if (path.suffix in {".py", ".md", ".toml", ".txt"} or path.name == "Makefile")
        and path.name != "LICENSES.txt"
    ]


# Measures: each finds lines that a test forbids, or allows a few of.


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, not those for type checkers alone."""
    for node in body:
        yield node
        if isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from at_import([*node.body, *handlers, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from at_import([*node.body, *node.orelse])


def room_imports(room: str, statements: Callable[[ast.Module], Iterable[ast.stmt]]) -> dict[str, set[str]]:
    """For each module of a room, the modules of the same room that ``statements`` of it import.

    Modules are named inside the room: ``scheduler.planner``.
    """
    paths = {".".join(["holdfast", *path.with_suffix("").parts]): path for path in modules(room)}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    inside = {name: name.removeprefix(f"holdfast.{room}").removeprefix(".") or "__init__" for name in paths}
    graph = {}
    for name, path in paths.items():
        found = set()
        for node in statements(tree_of(path)):
            for stem, taken in names_in(path, node):
                module = f"{stem}.{taken}" if f"{stem}.{taken}" in paths else stem
                found |= {inside[module]} if module in paths else set()
        graph[inside[name]] = found - {inside[name]}
    return graph


def longest_chain(room: str) -> list[str]:
    """The longest chain of imports inside a room, from the top down.

    Only imports at a module's top level count, not those in functions and not those below ``TYPE_CHECKING``.
    """
    graph = room_imports(room, lambda module: at_import(module.body))
    chains: dict[str, list[str]] = {}

    def below(name: str, above: tuple[str, ...]) -> list[str]:
        assert name not in above, f"{room}: {' -> '.join([*above, name])} is a circle"
        if name not in chains:
            under = [below(other, (*above, name)) for other in sorted(graph[name])]
            chains[name] = [name, *max(under, key=len, default=[])]
        return chains[name]

    return max((below(name, ()) for name in graph), key=len)


@pytest.mark.parametrize("room", ["runtime", "sessions", "sdk"])
def test_a_room_has_few_floors(room: str) -> None:
    chain = longest_chain(room)
    assert len(chain) <= FLOORS, f"{len(chain)} floors: {' -> '.join(chain)}"


def everywhere(module: ast.Module) -> Iterator[ast.stmt]:
    """All statements of a module, those in functions and below ``TYPE_CHECKING``, too."""
    return (node for node in ast.walk(module) if isinstance(node, ast.stmt))


@pytest.mark.parametrize("room", ["runtime", "kvstore", "sdk"])
def test_no_circle_between_the_folders_of_a_room(room: str) -> None:
    """Wherever in a file an import stands. A file beside the folders counts as one."""
    graph: dict[str, set[str]] = {}
    for module, others in room_imports(room, everywhere).items():
        own = module.split(".")[0]
        graph.setdefault(own, set()).update({other.split(".")[0] for other in others} - {own})
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as circle:
        pytest.fail(f"{room}: {' -> '.join(circle.args[1])}")


def upward_imports(room: str) -> list[str]:
    """Imports inside a room, wherever in a file, from a lower level to a higher one."""
    levels = {name: level for level, names in enumerate(INSIDE[room]) for name in names}

    def level(module: str) -> int | None:
        parts = module.split(".")
        stems = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((levels[stem] for stem in stems if stem in levels), None)

    wrong = []
    for module, others in room_imports(room, everywhere).items():
        for other in sorted(others):
            here, there = level(module), level(other)
            if here is not None and there is not None and there > here:
                wrong.append(f"{room}: {module} imports {other}")
    return wrong


@pytest.mark.parametrize("room", INSIDE)
def test_inside_a_room_imports_go_down(room: str) -> None:
    assert not upward_imports(room)


def test_the_order_inside_rooms_names_what_is_there() -> None:
    gone = [
        f"{room}: {name}"
        for room, floors in INSIDE.items()
        for name in itertools.chain(*floors)
        if not (ROOT / room / name.replace(".", "/")).is_dir()
        and not (ROOT / room / name.replace(".", "/")).with_suffix(".py").exists()
    ]
    assert not gone


FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


HOOKS = {Path("kernels/gpu/compiling.py")}
"""Triton's hooks are attributes of its settings, and there is no other way to set them."""


def callbacks() -> list[str]:
    """Lines where a function, a method, a lambda or a partial is assigned to an attribute of another object.

    ``self.x = …`` is the object's own; ``pool.x = self._method`` and ``self.pool.x = function`` are not.
    Anything that is assigned to an attribute that is declared ``Callable`` counts too.
    """
    methods, attributes, called = attribute_names()
    found = []
    for path in modules():
        if path in HOOKS:
            continue
        module = tree_of(path)
        functions = {node.name for node in ast.walk(module) if isinstance(node, FUNCTION)}
        functions -= {node.arg for node in ast.walk(module) if isinstance(node, ast.arg)}
        functions -= {node.id for node in ast.walk(module) if isinstance(node, ast.Name) and stored(node)}
        for node in ast.walk(module):
            if not isinstance(node, ast.Assign):
                continue
            for target, value in pairs(node):
                if is_another(target) and (
                    target.attr in called
                    or isinstance(value, ast.Lambda)
                    or (isinstance(value, ast.Name) and value.id in functions)
                    or (isinstance(value, ast.Attribute) and value.attr in methods - attributes)
                    or (isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "partial")
                ):
                    found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    return found


def pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is assigned to what, ``a, b = c, d`` taken apart."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def is_another(target: ast.expr) -> TypeGuard[ast.Attribute]:
    """Whether this is an attribute of an object other than ``self``."""
    return isinstance(target, ast.Attribute) and ast.unparse(target.value) not in ("self", "cls")


def attribute_names() -> tuple[set[str], set[str], set[str]]:
    """Names of methods, of fields and properties, and of fields that are declared ``Callable``."""
    methods, attributes, called = set(), set(), set()
    for path in modules():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, FUNCTION):
                        is_property = any("property" in ast.dump(mark) for mark in part.decorator_list)
                        (attributes if is_property else methods).add(part.name)
            if isinstance(node, ast.Attribute) and stored(node):
                attributes.add(node.attr)
            elif isinstance(node, ast.AnnAssign):
                name = ast.unparse(node.target).removeprefix("self.")
                attributes.add(name)
                if ast.unparse(node.annotation).startswith("Callable"):
                    called.add(name)
    return methods, attributes, called


def test_no_callback_is_assigned_into_another_object() -> None:
    assert not callbacks()


MUTATING = {"append", "extend", "insert", "add", "update", "setdefault", "clear", "pop", "popitem", "remove"}
MUTATING |= {"discard", "truncate", "difference_update", "intersection_update", "sort"}


def field_writers() -> dict[str, set[str]]:
    """For each field of `Sequence` and its records, the modules of `runtime` that write it after birth.

    The records are the other classes of the same file. A write is an assignment to ``x.field`` or to a part
    of it, or a call such as ``x.field.append(…)``. Fields of the same name in other classes do not count: those
    of ``self`` elsewhere, and of parameters and locals that have another type.
    """
    home = Path("runtime/sequence.py")
    records = [node for node in tree_of(home).body if isinstance(node, ast.ClassDef)]
    fields = {
        part.target.id: record.name
        for record in records
        for part in record.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    names = {record.name for record in records}
    writers: dict[str, set[str]] = defaultdict(set)
    for path in modules("runtime"):
        for written, typed in writes(path):
            own = ast.unparse(written.value) == "self"
            if written.attr in fields and (typed & names if typed else path == home or not own):
                writers[f"{fields[written.attr]}.{written.attr}"].add(str(path))
    return writers


def writes(path: Path) -> Iterator[tuple[ast.Attribute, set[str]]]:
    """Attributes that a module writes, each with the names in its object's declared type, if there is one."""
    for scope in ast.walk(tree_of(path)):
        if not isinstance(scope, FUNCTION):
            continue
        types = {
            argument.arg: set(re.findall(r"\w+", ast.unparse(argument.annotation)))
            for argument in [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
            if argument.annotation
        }
        made = [node for node in ast.walk(scope) if isinstance(node, ast.Assign)]
        for node in made:
            if isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
                name = ast.unparse(node.value.func).split(".")[-1]
                if name[:1].isupper():
                    types.setdefault(node.targets[0].id, {name})
        for node in ast.walk(scope):
            written: ast.expr | None = None
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                written = node
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                written = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                written = node.func.value if node.func.attr in MUTATING else None
            if isinstance(written, ast.Attribute):
                owner = written.value
                yield written, types.get(owner.id, set()) if isinstance(owner, ast.Name) else set()


def shared_fields() -> list[str]:
    return [
        f"{field}: {', '.join(sorted(paths))}"
        for field, paths in sorted(field_writers().items())
        if len(paths) > 1
    ]


def test_a_field_of_a_sequence_has_one_writer() -> None:
    assert not shared_fields()


def doubled_classes() -> list[str]:
    """Class names that stand in more than one file of the rooms, with the files."""
    files = defaultdict(list)
    for path in modules():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path))
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(files.items()) if len(paths) > 1]


def test_a_class_name_stands_for_one_class() -> None:
    found = doubled_classes()
    assert len(found) <= DOUBLED_CLASSES, found
