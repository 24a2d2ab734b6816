"""Sampling: greedy, the kept set against a slow plain reading, the distribution, and draws that repeat."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from holdfast.kernels.reference.philox import uniform
from holdfast.kernels.reference.seeded_sampling import sample


def draw(logits, *, temperature=1.0, top_k=0, top_p=1.0, seeds=None, positions=None):
    rows = logits.shape[0]
    return sample(
        logits,
        torch.full((rows,), float(temperature)),
        torch.full((rows,), top_k),
        torch.full((rows,), float(top_p), dtype=torch.float64),
        torch.zeros(rows, dtype=torch.int64) if seeds is None else seeds,
        torch.arange(rows) if positions is None else positions,
        min_p=torch.zeros(rows),
    )


def kept_plainly(row: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Id to share, as defined: by value, then id; first top_k, then the fewest that reach top_p."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))[: top_k or None]
    peak = row[order[0]]
    weights = [math.exp((row[token] - peak) / temperature) for token in order]
    kept, reached = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and reached >= top_p and top_p < 1:
            break
        kept.append((token, weight))
        reached += weight / sum(weights)
    total = sum(weight for _, weight in kept)
    return {token: weight / total for token, weight in sorted(kept)}


def drawn_plainly(shares: dict[int, float], at: float) -> int:
    reached = 0.0
    for token, share in shares.items():
        reached += share
        if at < reached:
            return token
    return max(shares)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_temperature_zero_is_greedy_in_any_mix() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    temperature = torch.tensor([0.0, 1.0, 0.0, 5.0])
    drawn = sample(
        logits,
        temperature,
        torch.zeros(4, dtype=torch.int64),
        torch.ones(4),
        torch.arange(4),
        torch.arange(4),
        min_p=torch.zeros(4),
    )
    assert drawn[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    assert not draw(torch.zeros(64, 5), temperature=0).any()  # of equal ones the first, and no draw


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.7, 5, 1.0),
        (1.3, 0, 0.8),
        (0.9, 12, 0.6),
        (2.0, 1, 1.0),
        (1.0, 0, 1e-9),
        (1.0, 99, 1.0),
    ],
)
def test_draws_follow_the_definition(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(200, 40, generator=torch.Generator().manual_seed(2)) * 2
    logits[:, ::7] = logits[:, 1::7][:, : logits[:, ::7].shape[1]]  # equal values: ids decide
    seeds = torch.arange(200) % 3
    drawn = draw(logits, temperature=temperature, top_k=top_k, top_p=top_p, seeds=seeds)
    at = uniform(seeds, torch.arange(200)).tolist()
    expected = [
        drawn_plainly(kept_plainly(row, temperature, top_k, top_p), one)
        for row, one in zip(logits.tolist(), at, strict=True)
    ]
    assert drawn.tolist() == expected


def test_rows_with_different_limits_do_not_disturb_each_other() -> None:
    logits = torch.randn(300, 64, generator=torch.Generator().manual_seed(3))
    limits = [(0.5, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.5), (1.5, 10, 0.9), (2.0, 30, 0.4)] * 60
    temperature, top_k, top_p = (list(one) for one in zip(*limits, strict=True))
    seeds, positions = torch.arange(300), torch.arange(300) + 7
    drawn = sample(
        logits,
        torch.tensor(temperature, dtype=torch.float64),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        seeds,
        positions,
        min_p=torch.zeros(300),
    )
    expected = [
        drawn_plainly(kept_plainly(row, *limit), at)
        for row, limit, at in zip(logits.tolist(), limits, uniform(seeds, positions).tolist(), strict=True)
    ]
    assert drawn.tolist() == expected


def test_a_row_draws_alone_what_it_draws_in_a_batch() -> None:
    logits = torch.randn(20, 64, generator=torch.Generator().manual_seed(6))
    together = draw(logits, top_k=8, top_p=0.9)
    alone = [
        draw(logits[at : at + 1], top_k=8, top_p=0.9, positions=torch.tensor([at])).item() for at in range(20)
    ]
    assert together.tolist() == alone


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.8, 8, 0.95)])
def test_the_distribution_is_right(temperature: float, top_k: int, top_p: float) -> None:
    row = torch.randn(1, 24, generator=torch.Generator().manual_seed(5))
    draws = 40_000
    drawn = draw(
        row.expand(draws, -1),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seeds=torch.full((draws,), 11),
    )
    shares = kept_plainly(row[0].tolist(), temperature, top_k, top_p)
    counts = np.bincount(drawn.numpy(), minlength=24)
    assert set(np.flatnonzero(counts)) == set(shares)
    expected = np.array(list(shares.values())) * draws
    # Degrees of freedom d: the chance of exceeding d + 4.5 * sqrt(2 d) is below 1e-4 here.
    freedom = len(shares) - 1
    assert chi_square(counts[list(shares)], expected) < freedom + 4.5 * math.sqrt(2 * freedom)


def test_seeds_and_positions_make_independent_draws() -> None:
    uniform_row = torch.zeros(1, 2).expand(4096, -1)
    by_position = draw(uniform_row, seeds=torch.full((4096,), 3))
    by_seed = draw(uniform_row, seeds=torch.arange(4096), positions=torch.full((4096,), 3))
    for drawn in (by_position, by_seed):
        assert abs(drawn.float().mean().item() - 0.5) < 0.04
        assert abs((drawn[1:] == drawn[:-1]).float().mean().item() - 0.5) < 0.04


def test_extremes_stay_in_range() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [float("nan")] * 3, [float("-inf"), 0.0, float("-inf")]])
    drawn = draw(logits, temperature=1e-300)
    assert drawn[0] == 0
    assert 0 <= drawn[1] < 3
    assert drawn[2] == 1
    assert (draw(logits, top_k=2, top_p=0.9) < 3).all()
