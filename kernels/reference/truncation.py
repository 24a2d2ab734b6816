"""The limits of sampling: top-k and top-p, min-p, locally typical sampling.

Each takes scores, fp64 ``[rows, vocab]``, and returns the tokens that it keeps. A score is the logit's distance
to the row's greatest, divided by the temperature; -inf for removed tokens. Limits are inclusive as in
transformers' warpers, except for equal scores: see `likeliest`.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 2.0**-34
"""What `masses` counts in, as a part of the likeliest token's mass. The masses of up to 2**19 tokens have a sum
below 2**53, which fp64 holds exactly."""


def masses(scores: Tensor) -> Tensor:
    """Unnormalised probabilities of ``scores``, of which the greatest is 0: whole numbers of `UNIT`, fp64
    ``[rows, vocab]``. Below a score of -24.3 they are 0."""
    return scores.exp().div_(UNIT).round_()


def candidates_of(top_k: Tensor, top_p: Tensor, vocab: int) -> int:
    """How many of a row's likeliest tokens top-k and top-p can affect, over all rows: ``vocab`` if a row has
    a top-p without a top-k, else the largest ``top_k`` (0: no limits). Waits for the device."""
    if bool(((top_k == 0) & (top_p < 1)).any()):
        return vocab
    return min(int(top_k.max()), vocab)


def likeliest(scores: Tensor, top_k: Tensor, top_p: Tensor, candidates: int) -> Tensor:
    """The tokens that top-k and top-p keep: the ``top_k`` likeliest, and of these the fewest that have
    ``top_p`` of the mass: bool ``[rows, vocab]``.

    How many are kept depends only on the sorted scores; of equal scores the lower ids are kept (transformers
    keeps more than ``top_k`` tokens if the last is one of several equal ones). ``top_k`` (0: all) and
    ``top_p`` (1: all): ``[rows]``. ``candidates``: how many of a row's likeliest tokens these two can affect.
    """
    vocab = scores.shape[-1]
    width = min(candidates, vocab)
    best = scores.topk(width, dim=-1).values
    limit = torch.where(top_k == 0, vocab, top_k)[:, None]
    rank = torch.arange(width, device=scores.device)
    mass = masses(best.masked_fill_(rank >= limit, float("-inf")))
    reached = mass.cumsum(-1)
    inside = (rank < limit) & ((reached - mass < top_p[:, None] * reached[:, -1:]) | (rank == 0))
    unlimited = (top_k == 0) & (top_p >= 1)
    amount = torch.where(unlimited, vocab, inside.sum(-1))[:, None]
    edge = best.gather(-1, (amount - 1).clamp(max=width - 1))
    above, level = scores > edge, scores == edge
    room = amount - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= room)) | unlimited[:, None]


def near_the_best(scores: Tensor, min_p: Tensor) -> Tensor:
    """The tokens that min-p keeps: those at least ``min_p`` (``[rows]``, 0: all) times as likely as the
    likeliest: bool ``[rows, vocab]``.

    Nguyen et al., "Turning up the heat: min-p sampling" (ICLR 2025).
    """
    return scores >= min_p.log()[:, None]


def typical(scores: Tensor, mass: Tensor) -> Tensor:
    """The tokens that typical sampling keeps: those with a surprise nearest to the expected one, as many as
    have ``mass`` ``[rows]`` of the probability.

    Surprise is -log of a token's probability; its expectation is the entropy. Returns bool ``[rows, vocab]``;
    equally near tokens at the limit are all kept. Meister et al., "Locally typical sampling" (TACL 2023).
    """
    logs = scores.log_softmax(-1)
    shares = logs.exp()
    entropy = -(shares * logs).nansum(-1, keepdim=True)
    distance = (-logs - entropy).abs()
    nearest = distance.sort(dim=-1, stable=True)
    reached = shares.gather(-1, nearest.indices).cumsum(-1)
    last = (reached < mass[:, None]).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    return distance <= nearest.values.gather(-1, last)
