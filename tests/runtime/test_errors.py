"""The tree of errors: codes that cross the link and come back as the same class."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.runtime import errors
from holdfast.runtime.errors import RuntimeFault, fault_of


def tree(root: type[RuntimeFault]) -> Iterator[type[RuntimeFault]]:
    yield root
    for leaf in root.__subclasses__():
        yield from tree(leaf)


def test_every_class_has_its_own_code() -> None:
    codes = [kind.code for kind in tree(RuntimeFault)]
    assert len(set(codes)) == len(codes)


def test_the_drawing_shows_every_class() -> None:
    drawing = errors.__doc__ or ""
    assert not [kind.__name__ for kind in tree(RuntimeFault) if kind.__name__ not in drawing]


@pytest.mark.parametrize("kind", list(tree(RuntimeFault)), ids=lambda kind: kind.__name__)
def test_a_code_comes_back_as_its_class(kind: type[RuntimeFault]) -> None:
    fault = fault_of(kind.code, "why")
    assert type(fault) is kind and fault.message == "why"


def test_an_unknown_code_is_named() -> None:
    fault = fault_of("of_tomorrow", "why")
    assert type(fault) is RuntimeFault and fault.message == "of_tomorrow: why"
