"""Seeded sampling: the token that each row's logits and limits give, at the random number of its seed and
position; and log probabilities.

The order on a row's logits is that of transformers' processors: bias, penalties, forbidden tokens
(`penalties`); temperature, top-k, top-p, min-p, typical (`truncation`); the sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import truncation
from .philox import uniform

COLDEST = 1e-6
"""The lowest temperature; lower ones are raised to it, so that nothing overflows."""


@dataclass(frozen=True, slots=True)
class Typical:
    """The rows with locally typical sampling: ``rows`` int64 ``[n]``, their indices; ``mass`` fp64 ``[n]``,
    the probability that the kept tokens have, below 1."""

    rows: Tensor
    mass: Tensor


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    min_p: Tensor,
    typical: Typical | None = None,
) -> Tensor:
    """Sample one token id per row: int64 ``[rows]``.

    ``logits``: fp32 ``[rows, vocab]``. ``temperature`` (0: greedy), ``top_p`` (1: all), ``min_p`` (0: all):
    float ``[rows]``; ``top_k`` (0: all), ``seeds``, ``positions`` (of the sampled token): int64 ``[rows]``.
    ``typical``: None if no row has it.

    Kept are the ``top_k`` likeliest tokens (the lower ids of equal ones), of these the fewest that have
    ``top_p`` of the mass, and of these what ``min_p`` and ``typical`` leave. The sampled token is the inverse
    distribution function over the kept tokens in the order of their ids, at one uniform number of (seed,
    position). A token's mass is a whole number (`truncation.masses`), so that sums do not depend on their
    order: the token is the same in any batch and by every backend.

    Does not wait for a device: only on the CPU it reads the tensors, to skip what no row asks for.
    """
    seen, vocab = not logits.is_cuda, logits.shape[-1]
    inverse = temperature.double().clamp(min=COLDEST).reciprocal()
    scores = (logits.double() - logits.amax(-1, keepdim=True)).mul_(inverse[:, None])
    candidates = truncation.candidates_of(top_k, top_p, vocab) if seen else vocab
    if candidates:
        _keep(scores, truncation.likeliest(scores, top_k, top_p.double(), candidates))
    if not seen or bool(min_p.any()):
        _keep(scores, truncation.near_the_best(scores, min_p.double()))
    if typical is not None:
        some = scores[typical.rows]
        _keep(some, truncation.typical(some, typical.mass))
        scores.index_copy_(0, typical.rows, some - some.amax(-1, keepdim=True))
    drawn = _inverse(truncation.masses(scores).cumsum(-1), uniform(seeds, positions))
    return torch.where(temperature <= 0, logits.argmax(-1), drawn)


def _keep(scores: Tensor, kept: Tensor) -> None:
    scores.masked_fill_(~kept, float("-inf"))


def _inverse(cumulated: Tensor, uniforms: Tensor) -> Tensor:
    """For each row the first id at which the cumulated mass ``cumulated`` ``[rows, vocab]``, whole numbers,
    exceeds the uniform number times the total; in range even for NaN rows."""
    total = cumulated[:, -1]
    target = torch.minimum(uniforms * total, total - 1)
    found = torch.searchsorted(cumulated, target[:, None], right=True).squeeze(-1)
    return found.clamp(max=cumulated.shape[-1] - 1)


def log_probabilities(logits: Tensor, ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log probability of ``ids`` ``[rows]``; and the ids and log probabilities of the ``most`` likeliest
    tokens.

    ``logits``: fp32 ``[rows, vocab]``, before any edit. Returns fp64 ``[rows]``, and int64 and fp64 ``[rows,
    most]``, likeliest first.
    """
    whole = logits.double().logsumexp(-1, keepdim=True)
    chosen = logits.gather(-1, ids[:, None]).double() - whole
    best = logits.topk(most, dim=-1)
    return chosen.squeeze(-1), best.indices, best.values.double() - whole
