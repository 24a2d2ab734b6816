"""The tree: paths, spans that replace the end of their parent's path, and a head that moves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.sessions.conversation.tree import Paths, TurnNode, TurnReply
from holdfast.sessions.token_ids import common_prefix, ids_of

spans = st.lists(st.integers(0, 9), max_size=5)


def node(parent: TurnNode | None, drop: int, prompt: list[int], reply: list[int]) -> TurnNode:
    keep = 0 if parent is None else max(0, parent.length - drop)
    return TurnNode(parent, (), keep, ids_of(prompt), TurnReply((), ids_of(reply), ended=True))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), spans, spans), min_size=1, max_size=6))
def test_tokens_of_a_path_are_its_spans_laid_over_each_other(turns: list) -> None:
    expected: list[int] = []
    last = None
    for drop, prompt, reply in turns:
        last = node(last, drop, prompt, reply)
        expected = expected[: max(0, len(expected) - drop)] + prompt + reply
        assert last.tokens().tolist() == expected
        assert last.length == len(expected)
        assert last.start == len(expected) - len(reply)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 12), spans, spans), min_size=1, max_size=8))
def test_paths_that_follow_from_the_last_one_are_the_nodes(turns: list) -> None:
    paths, nodes = Paths(), list[TurnNode]()
    for at, drop, prompt, reply in turns:
        parent = nodes[at % len(nodes)] if nodes else None  # often the last, sometimes one beside it
        nodes.append(node(parent, drop, prompt, reply))
        for asked in (nodes[-1], nodes[at % len(nodes)]):
            assert paths.tokens(asked).tolist() == asked.tokens().tolist()


def test_branches_share_their_trunk() -> None:
    trunk = node(None, 0, [1], [2])
    one, other = node(trunk, 0, [3], [4]), node(trunk, 1, [5], [6])
    assert tuple(one.ancestry()) == (one, trunk)
    assert tuple(other.ancestry()) == (other, trunk)
    assert other.tokens().tolist() == [1, 5, 6]
    assert one.tokens().tolist() == [1, 2, 3, 4]


def test_ids_are_read_only() -> None:
    assert not ids_of([1]).flags.writeable
    assert not node(None, 0, [1], [2]).tokens().flags.writeable


@settings(deadline=None)
@given(spans, spans)
def test_common_prefix(one: list[int], other: list[int]) -> None:
    shared = common_prefix(ids_of(one), ids_of(other))
    assert one[:shared] == other[:shared]
    assert one[shared : shared + 1] != other[shared : shared + 1] or not one[shared:] or not other[shared:]
