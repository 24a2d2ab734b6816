"""KV groups: arithmetic of their layouts, bounds, digests."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from holdfast.kvstore.errors import GroupInvalid
from holdfast.kvstore.groups import HeadLayout, KVGroup, LatentLayout

GROUP = KVGroup(id=0, layers=(0, 1, 2, 3), layout=HeadLayout(2, 64), dtype="bfloat16")
LATENT = replace(GROUP, layout=LatentLayout(512, 64))


def test_a_block_s_bytes() -> None:
    assert GROUP.block_shape == (4, 2, 2, 16, 64)
    assert GROUP.block_bytes == 4 * 2 * 2 * 16 * 64 * 2
    assert replace(GROUP, dtype="float32").block_bytes == 2 * GROUP.block_bytes
    assert LATENT.block_shape == (4, 16, 576)
    assert LATENT.block_bytes == 4 * 16 * 576 * 2


@pytest.mark.parametrize("tokens", [0, 1, 15, 16])
def test_what_lies_behind_some_tokens_is_zeroed_and_nothing_else(tokens: int) -> None:
    heads, latent = (np.ones(group.block_shape, np.uint16) for group in (GROUP, LATENT))
    GROUP.zero_behind(memoryview(heads).cast("B"), tokens)
    LATENT.zero_behind(memoryview(latent).cast("B"), tokens)
    assert heads[:, :, :, :tokens].all() and not heads[:, :, :, tokens:].any()
    assert latent[:, :tokens].all() and not latent[:, tokens:].any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": -1},
        {"layers": ()},
        {"layers": (0, 0)},
        {"layers": (-1, 0)},
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


@pytest.mark.parametrize("layout", [HeadLayout, LatentLayout])
@pytest.mark.parametrize("wrong", [0, 1])
def test_sizes_of_a_layout_are_named(layout: type[HeadLayout | LatentLayout], wrong: int) -> None:
    sizes = [8, 8]
    sizes[wrong] = 0
    with pytest.raises(GroupInvalid, match=f"KV group: {fields(layout)[wrong].name} = 0"):
        replace(GROUP, layout=layout(*sizes))


def test_every_field_changes_the_digest() -> None:
    changes = [
        {},
        {"id": 1},
        {"layers": (0, 1, 2)},
        {"layout": HeadLayout(4, 64)},
        {"layout": HeadLayout(2, 32)},
        {"layout": HeadLayout(2, 64, key_scale=0.5)},
        {"layout": HeadLayout(2, 64, value_scale=0.5)},
        {"layout": LatentLayout(2, 64)},
        {"layout": LatentLayout(64, 2)},
        {"dtype": "float16"},
        {"block_tokens": 32},
        {"window": 128},
    ]
    digests = {replace(GROUP, **change).spec_digest() for change in changes}  # type: ignore[arg-type]
    assert len(digests) == len(changes)
    assert GROUP.spec_digest() == replace(GROUP).spec_digest()


def test_digests_stay_as_they_were() -> None:
    """They name the records of earlier starts: if one changes, LAYOUT_VERSION must."""
    assert GROUP.spec_digest().hex() == "c9191ca8ed4f67888ebff1a70f6150fe"
    scaled = KVGroup(1, (0, 2), HeadLayout(2, 64, key_scale=0.5), "float8_e4m3fn", 32, 128)
    assert scaled.spec_digest().hex() == "a380c964892765d6833847e0a13babe2"


def test_the_layout_version_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = GROUP.spec_digest()
    monkeypatch.setattr("holdfast.kvstore.groups.LAYOUT_VERSION", 99)
    assert GROUP.spec_digest() != before
