"""JSON bodies that are bent at random: a few values replaced, left out, doubled or added."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st


def values(words: Sequence[str], names: Sequence[str]) -> st.SearchStrategy[Any]:
    """Any JSON values. ``words``: texts that mean something in the protocol; ``names``: of its fields."""
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.sampled_from(words),
    )
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*names, "type"]), inner, max_size=3)
        ),
        max_leaves=6,
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, one in inner for place in ((*path, key), *places(one, (*path, key)))]


@st.composite
def bent(draw: Any, whole: dict[str, Any], words: Sequence[str], more: Sequence[str] = ()) -> dict[str, Any]:
    """The body ``whole``, bent in one to three places. ``words``: as in `values`; ``more``: names of fields
    that it may get, besides its own."""
    body = copy.deepcopy(whole)
    drawn = values(words, list(whole))
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(places(body)))
        holder: Any = body
        for key in path:
            holder = holder[key]
        match draw(st.sampled_from(["replace", "drop", "double", "add"])):
            case "replace":
                holder[last] = draw(drawn)
            case "drop":
                del holder[last]
            case "double" if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[last]))
            case _ if isinstance(holder, dict):
                holder[draw(st.sampled_from([*whole, "surprise", *more]))] = draw(drawn)
    return body
