"""KV groups: arithmetic of their layouts, digests."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from holdfast.kvstore.groups import HeadLayout, KVGroup, LatentLayout, Windows, split_layers

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


@given(st.lists(st.sampled_from((None, 8, 24)), min_size=1, max_size=80))
def test_layers_are_split_into_groups_of_one_window_that_waste_little(windows: list[int | None]) -> None:
    groups = split_layers(windows)
    assert sorted(layer for group in groups for layer in group) == list(range(len(windows)))
    assert all(len({windows[layer] for layer in group}) == 1 for group in groups)
    assert max(map(len, groups)) * len(groups) * 8 <= len(windows) * 9


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None] * 5, [5]),
        ([64] * 5, [5]),
        ([64, None] * 3, [3, 3]),
        (([64] * 5 + [None]) * 4, [5, 5, 5, 5, 4]),
        (([512] * 5 + [None]) * 4 + [512] * 2, [4, 4, 4, 4, 4, 2, 4]),
    ],
)
def test_groups_are_few(windows: list[int | None], sizes: list[int]) -> None:
    assert [len(group) for group in split_layers(windows)] == sizes


def test_a_window_sees_its_last_blocks() -> None:
    windows = Windows((None, 6), 4)
    assert (windows.whole, windows.narrow) == ([0], [1])
    assert [windows.first(1, at) for at in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]
    assert [windows.blocks(tokens) for tokens in (0, 4, 5, 13)] == [0, 2, 4, 7], (
        "of 13 tokens the last may be lost"
    )
    assert windows.blocks(13, 9) == 8, "what tokens from the ninth on see"
    assert [windows.within(blocks, 13) for blocks in (6, 7)] == [3, 4]
