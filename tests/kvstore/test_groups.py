"""KV groups: arithmetic, bounds, digests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.kvstore.errors import GroupInvalid
from holdfast.kvstore.groups import KVGroup

GROUP = KVGroup(id=0, layers=(0, 1, 2, 3), kv_heads=2, head_dim=64, dtype="bfloat16")


def test_a_block_s_bytes() -> None:
    assert GROUP.block_shape == (4, 2, 2, 16, 64)
    assert GROUP.block_bytes == 4 * 2 * 2 * 16 * 64 * 2
    assert replace(GROUP, dtype="float32").block_bytes == 2 * GROUP.block_bytes


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": -1},
        {"layers": ()},
        {"layers": (0, 0)},
        {"layers": (-1, 0)},
        {"kv_heads": 0},
        {"head_dim": 0},
        {"block_tokens": 0},
        {"window": 0},
        {"dtype": "int8"},
    ],
    ids=str,
)
def test_impossible_numbers_are_named(wrong: dict[str, object]) -> None:
    [(name, value)] = wrong.items()
    with pytest.raises(GroupInvalid, match=f"KV group: {name} = ") as refused:
        replace(GROUP, **wrong)  # type: ignore[arg-type]
    assert repr(value) in str(refused.value)


def test_every_field_changes_the_digest() -> None:
    changes = [
        {},
        {"id": 1},
        {"layers": (0, 1, 2)},
        {"kv_heads": 4},
        {"head_dim": 32},
        {"dtype": "float16"},
        {"block_tokens": 32},
        {"window": 128},
    ]
    digests = {replace(GROUP, **change).spec_digest() for change in changes}  # type: ignore[arg-type]
    assert len(digests) == len(changes)
    assert GROUP.spec_digest() == replace(GROUP).spec_digest()


def test_the_layout_version_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = GROUP.spec_digest()
    monkeypatch.setattr("holdfast.kvstore.groups.LAYOUT_VERSION", 99)
    assert GROUP.spec_digest() != before
