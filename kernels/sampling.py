"""Drawing the next token: greedy, or by temperature, top-k and top-p from a counter-based uniform number.

The reference in plain torch. Knows nothing of sequences: a row is logits and five numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .philox import uniform

COLDEST = 1e-6
"""Lower temperatures are read as this one: the likeliest token, without overflow."""


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    candidates: int | None = None,
) -> Tensor:
    """Draw one token id per row: int64 ``[rows]``.

    ``logits``: fp32 ``[rows, vocab]``. ``temperature`` (0: greedy), ``top_p`` (1: all): float ``[rows]``;
    ``top_k`` (0: all), ``seeds``, ``positions`` (of the token drawn): int64 ``[rows]``.

    Kept are the ``top_k`` likeliest tokens (of equal ones the lower ids), then of these the fewest whose
    share reaches ``top_p``. The draw is the inverse distribution function over the kept tokens in the order
    of their ids, at one uniform number of (seed, position) alone, in float64: the same alone and in any
    batch.

    ``candidates``: how many of a row's likeliest tokens the limits can concern: 0 if no row has one, the
    largest ``top_k`` if all have one, else vocab. None looks into the tensors, which waits for the device.
    """
    greedy = temperature <= 0
    scaled = logits.double() / temperature.double().clamp(min=COLDEST)[:, None]
    if candidates is None:
        candidates = _candidates(top_k, top_p, logits.shape[-1])
    if candidates:
        scaled = scaled.masked_fill(~_kept(scaled, top_k, top_p.double(), candidates), float("-inf"))
    drawn = _inverse(scaled.softmax(-1).cumsum(-1), uniform(seeds, positions))
    return torch.where(greedy, logits.argmax(-1), drawn)


def _candidates(top_k: Tensor, top_p: Tensor, vocab: int) -> int:
    if bool(((top_k == 0) & (top_p < 1)).any()):
        return vocab
    return min(int(top_k.max()), vocab)


def _kept(scaled: Tensor, top_k: Tensor, top_p: Tensor, candidates: int) -> Tensor:
    """Which tokens the limits leave: bool ``[rows, vocab]``.

    How many are kept depends on the sorted values alone; which of equal values, on their ids.
    """
    vocab = scaled.shape[-1]
    width = min(candidates, vocab)
    best = scaled.topk(width, dim=-1).values
    limit = torch.where(top_k == 0, vocab, top_k)[:, None]
    rank = torch.arange(width, device=scaled.device)
    share = best.masked_fill(rank >= limit, float("-inf")).softmax(-1)
    before = share.cumsum(-1) - share
    inside = (rank < limit) & ((before < top_p[:, None]) | (rank == 0))
    unlimited = (top_k == 0) & (top_p >= 1)
    amount = torch.where(unlimited, vocab, inside.sum(-1))[:, None]
    edge = best.gather(-1, (amount - 1).clamp(max=width - 1))
    above, level = scaled > edge, scaled == edge
    room = amount - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= room)) | unlimited[:, None]


def _inverse(cumulated: Tensor, uniforms: Tensor) -> Tensor:
    """The first id whose cumulated share exceeds the uniform number; in range even for NaN rows."""
    total = cumulated[:, -1]
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulated, target[:, None], right=True).squeeze(-1)
    return found.clamp(max=cumulated.shape[-1] - 1)
