"""Limits and draws against transformers' own processors: the kept set, and 100,000 draws per method."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from holdfast.kernels.reference.seeded_sampling import Typical, sample

VOCAB, DRAWS, CHUNK = 64, 100_000, 25_000
NO_IDS = torch.zeros((1, 1), dtype=torch.int64)

METHODS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "typical": {"typical_p": 0.7},
    "typical of most": {"typical_p": 0.95, "temperature": 1.4},
    "all": {
        "temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9,
    },
}  # fmt: skip


def processors(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, typical_p: float = 1.0
) -> LogitsProcessorList:
    """In the order of transformers' ``generate``."""
    made = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        made.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        made.append(TopPLogitsWarper(top_p))
    if min_p:
        made.append(MinPLogitsWarper(min_p))
    if typical_p < 1:
        made.append(TypicalLogitsWarper(typical_p))
    return made


def draw(
    logits: torch.Tensor,
    positions: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> torch.Tensor:
    rows = len(logits)

    def every(value: float) -> torch.Tensor:
        return torch.full((rows,), value, dtype=torch.float64)

    return sample(
        logits,
        every(temperature),
        torch.full((rows,), top_k),
        every(top_p),
        torch.full((rows,), 5),
        positions,
        min_p=every(min_p),
        typical=Typical(torch.arange(rows), every(typical_p)) if typical_p < 1 else None,
    )


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_hundred_thousand_draws_follow_transformers(method: dict[str, float]) -> None:
    row = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(17)) * 1.5
    expected = processors(**method)(NO_IDS, row).double().softmax(-1)[0].numpy() * DRAWS
    counts = np.zeros(VOCAB)
    for start in range(0, DRAWS, CHUNK):
        drawn = draw(row.expand(CHUNK, -1), torch.arange(start, start + CHUNK), **method)
        counts += np.bincount(drawn.numpy(), minlength=VOCAB)
    kept = expected > 0
    assert not counts[~kept].any(), "what a limit takes out is never drawn"
    if method != METHODS["temperature"] and method != METHODS["hot"]:
        assert 1 < kept.sum() < VOCAB, "the method must limit something"
    statistic = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    # Degrees of freedom d: the chance of exceeding d + 4.5 * sqrt(2 d) is below 1e-4 here.
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom)


def test_limits_of_many_rows_keep_what_transformers_keeps() -> None:
    """What is kept shows in what is drawn: at 300 positions no token outside it, on 40 different rows."""
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    for method in METHODS.values():
        kept = processors(**method)(NO_IDS.expand(40, 1), logits.clone()).isfinite()
        for position in range(0, 300, 7):
            drawn = draw(logits, torch.arange(40) * 1000 + position, **method)
            assert kept.gather(-1, drawn[:, None]).all()


def test_rows_draw_alone_what_they_draw_in_a_mixed_batch() -> None:
    """Typical rows and others, with min-p and without: the limits of one row do not affect another."""
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(8))
    positions = torch.arange(12) * 3
    min_p = torch.tensor([0.0, 0.2, 0.05] * 4, dtype=torch.float64)
    some = torch.tensor([1, 4, 5, 11])
    ones, none = torch.ones(12, dtype=torch.float64), torch.zeros(12, dtype=torch.int64)
    mass = torch.tensor([0.3, 0.5, 0.9, 0.2], dtype=torch.float64)
    together = sample(
        logits, ones, none, ones, none + 5, positions, min_p=min_p, typical=Typical(some, mass)
    ).tolist()
    typical_p = dict(zip(some.tolist(), mass.tolist(), strict=True))
    alone = [
        draw(
            logits[at : at + 1],
            positions[at : at + 1],
            min_p=min_p[at].item(),
            typical_p=typical_p.get(at, 1.0),
        ).item()
        for at in range(12)
    ]
    assert together == alone


def test_the_likeliest_always_stays() -> None:
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(9))
    assert draw(logits, torch.arange(50), min_p=1.0).tolist() == logits.argmax(-1).tolist()
    assert (draw(logits, torch.arange(50), typical_p=1e-9) < VOCAB).all()
