"""What a user of the SDK can write: names in public signatures can be imported, events stand in the guide."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import sdk
from holdfast.sdk import errors, sync

GUIDE = Path(sdk.__file__).with_name("README.md").read_text()
MADE = {"Chat", "Turn", "Run", "Reply", "TextInput", "SyncChat", "SyncClient", "SyncStream", "AsyncOpening"}
"""Classes that the SDK makes: their constructors are not for users."""
INSIDE = {"resumed", "witness"}
"""Methods of `Chat` and `Reply` that other modules of the SDK call."""
ELSEWHERE = {"BlockingPortal", "Path", "PathLike", "SSLContext", "deque", "Detached", "UnsetType"}
"""Names of the standard library and of msgspec, and what `Tool` keeps for itself."""


def public() -> Iterator[tuple[str, object]]:
    """Each public function, class and method, with its name."""
    for name in (
        *sdk.__all__,
        *(f"sync.{one}" for one in ("connect", "SyncChat", "SyncClient", "SyncStream")),
    ):
        found = getattr(sync if name.startswith("sync.") else sdk, name.removeprefix("sync."))
        if inspect.isfunction(found):
            yield name, inspect.unwrap(found)
        if not (inspect.isclass(found) and found.__module__.startswith("holdfast.sdk")):
            continue
        if "holdfast.sdk.frames" in found.__module__:
            continue  # its fields are the wire's: `gateway/PROTOCOL.md`
        if dataclasses.is_dataclass(found) or typing.is_typeddict(found):
            yield name, found
        for method, value in vars(found).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            made_inside = name.removeprefix("sync.") in MADE and method in {"__init__", *INSIDE}
            shown = not method.startswith("_") or method == "__init__"
            if inspect.isfunction(function) and shown and not made_inside:
                yield f"{name}.{method}", inspect.unwrap(function)


def names_in(annotation: str) -> set[str]:
    tree = ast.walk(ast.parse(annotation, mode="eval"))
    return {node.attr if isinstance(node, ast.Attribute) else node.id
            for node in tree if isinstance(node, ast.Attribute | ast.Name)}  # fmt: skip


def test_each_name_in_a_public_signature_can_be_imported() -> None:
    missing = {}
    for name, owner in public():
        for annotation in getattr(owner, "__annotations__", {}).values():
            for used in names_in(annotation) if isinstance(annotation, str) else ():
                known = hasattr(builtins, used) or hasattr(typing, used) or used in ELSEWHERE
                known = known or used.startswith(("_", "Sync")) or used in {"server", "client"}
                if not known and used not in sdk.__all__:
                    missing.setdefault(used, name)
    assert not missing


def test_each_error_of_the_tree_can_be_imported() -> None:
    tree = {name for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, Exception)}
    assert tree <= set(sdk.__all__), tree - set(sdk.__all__)


def test_tool_like_is_among_them() -> None:
    assert sdk.ToolLike is not None and "ToolLike" in sdk.__all__


@pytest.mark.parametrize("event", typing.get_args(sdk.RunEvent), ids=lambda event: event.__name__)
def test_the_guide_has_the_fields_of_each_event(event: type) -> None:
    (row,) = [line for line in GUIDE.splitlines() if line.startswith(f"| `{event.__name__}` |")]
    missing = [field.name for field in dataclasses.fields(event) if f"`{field.name}`" not in row]
    assert not missing


def test_the_guide_has_the_fields_of_patience_and_of_a_retry() -> None:
    for kind in (sdk.Patience, sdk.Retry):
        missing = [field.name for field in dataclasses.fields(kind) if f"`{field.name}`" not in GUIDE]
        assert not missing, kind
