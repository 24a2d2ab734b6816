"""The sampling kernels, interpreted, against the reference: the same token for every row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.gpu import seeded_sampling as kernels
from holdfast.kernels.reference import seeded_sampling

VOCAB = 5_011
CHUNK = 64
LIMITS = st.tuples(
    st.sampled_from([0.0, 1e-7, 0.3, 1.0, 4.0, 1e30]),
    st.just(0) | st.integers(1, 250),
    st.just(1.0) | st.floats(0.0, 1.0) | st.sampled_from([1e-12, 0.25, 0.5, 0.999999]),
    st.just(0.0) | st.floats(0.0, 1.0),
)


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"draw": {"CHUNK": CHUNK}, "pick": {"TILE": 32}}
    monkeypatch.setattr(kernels, "chosen", lambda name, *_: sizes[name])


def rows(count: int, vocab: int, seed: int, kind: str = "") -> torch.Tensor:
    """Random logits; ``coarse`` ones have many equals and some that are forbidden."""
    logits = torch.randn((count, vocab), generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "equal":
        return torch.zeros_like(logits) - 2.5
    if kind == "masked":
        return torch.where(torch.arange(vocab) % 7 == seed % 7, logits, float("-inf"))
    return torch.where(logits < -6, float("-inf"), logits.round()) if kind == "coarse" else logits


def both(logits: torch.Tensor, limits: list[tuple[float, int, float, float]]) -> None:
    count = len(logits)
    heat, k, p, least = zip(*limits, strict=True)
    arguments = (
        logits,
        torch.tensor(heat).double(),
        torch.tensor(k),
        torch.tensor(p).double(),
        torch.arange(count) * 0x1_2345_6789 - 3,
        torch.arange(count) * 0x7_0000_0001,
    )
    min_p = torch.tensor(least).double()
    expected = seeded_sampling.sample(*arguments, min_p=min_p)
    assert kernels.sample(*arguments, min_p=min_p).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["", "coarse", "equal", "masked"])
def test_rows_of_every_kind_in_one_batch(kind: str) -> None:
    """In chunks as they are on a GPU."""
    limits = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (1.5, 0, 1.0, 0.3),
        (1.0, 1, 0.9, 0.0),
        (0.7, 200, 0.5, 0.0),
        (1.0, 50, 1.0, 0.1),
        (0.8, 0, 0.2, 0.0),
        (2.0, 4_500, 0.999, 0.01),
        (1.0, 9_999, 0.9, 0.0),
        (1.0, 7, 0.0, 0.0),
        (1.0, 0, 1e-9, 0.0),
        (0.0, 5, 0.5, 0.5),
    ]
    both(rows(len(limits), VOCAB, 1, kind), limits)


@pytest.mark.usefixtures("_small_chunks")
def test_drawn_rows() -> None:
    """Limits of all kinds and sizes beside each other, and vocabularies that end anywhere in a chunk."""

    @settings(max_examples=25, deadline=None)
    @given(
        st.integers(1, 3 * CHUNK),
        st.integers(0, 99),
        st.sampled_from(["", "coarse", "equal", "masked"]),
        st.lists(LIMITS, min_size=1, max_size=3),
    )
    def run(vocab: int, seed: int, kind: str, limits: list[tuple[float, int, float, float]]) -> None:
        logits = rows(len(limits), vocab, seed, kind)
        both(torch.where(logits.amax(-1, keepdim=True) == float("-inf"), 0.0, logits), limits)

    run()


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize(("spread", "heat"), [(1e-4, 1.0), (0.5, 1e-3), (1.0, 20.0), (1e5, 1.0)])
def test_limits_anywhere_in_narrow_and_wide_rows(spread: float, heat: float) -> None:
    limits = [(heat, k, p, 0.2 * (k == 3)) for k in (0, 3, 140) for p in (1.0, 0.97, 0.3)]
    both(rows(len(limits), 150, 4) * spread, limits)


@pytest.mark.usefixtures("_small_chunks")
def test_a_row_that_is_not_finite_or_wholly_forbidden_disturbs_no_other() -> None:
    logits = rows(12, 300, 6)
    logits[1::4] = float("-inf")
    logits[2::4, 100] = float("nan")
    logits[3::4, 200] = float("inf")
    numbers = (
        torch.ones(12).double(),
        torch.tensor([0, 7, 0] * 4),
        torch.tensor([0.9, 1.0, 1.0, 0.5] * 3).double(),
    )
    seeds, none = torch.arange(12), torch.zeros(12).double()
    got = kernels.sample(logits, *numbers, seeds, seeds, min_p=none)
    expected = seeded_sampling.sample(logits, *numbers, seeds, seeds, min_p=none)
    assert got[::4].tolist() == expected[::4].tolist()
    assert ((got >= 0) & (got < 300)).all()
    greedy = kernels.sample(logits, none, *numbers[1:], seeds, seeds, min_p=none)
    assert greedy.tolist() == logits.argmax(-1).tolist()
