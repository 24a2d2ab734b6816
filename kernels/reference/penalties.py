"""What is done to logits before temperature: bias, penalties for what was said, tokens that may not come.

All work in place on fp32 ``[rows, vocab]`` and wait for no device. The order in which to use them is that of
transformers' processors: `add`, `penalize`, `forbid`; `allow` at the end. Knows nothing of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_TOKEN = -1
"""Pads the beginning of a shorter word: it stands for any token."""

NOTHING = -2
"""Pads what a row has said where it has not said enough: it is no token."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the rows to penalize have said so far.

    ``rows``: int64 ``[n]``, which of the logits' rows they are. ``tokens``: int64 ``[t]``, their ids, one row
    after the other. ``owners``: int64 ``[t]``, which of the ``n`` each is of. ``output``: int64 ``[t]``, 1
    where the model said it in this turn, 0 for its prompt.
    """

    rows: Tensor
    tokens: Tensor
    owners: Tensor
    output: Tensor


def add(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add ``values`` float ``[n]`` to the logits of ``tokens`` in ``rows``, int64 ``[n]``."""
    logits.index_put_((rows, tokens), values.to(logits.dtype), accumulate=True)


def penalize(logits: Tensor, said: Said, repetition: Tensor, frequency: Tensor, presence: Tensor) -> None:
    """Make likelier or less likely what was said; the three are float ``[n]``, in the order of ``said.rows``.

    ``repetition`` (1: none) divides the logit of each token of prompt and output if it is positive and
    multiplies it otherwise (Keskar et al., CTRL, 2019; transformers' processor). Then ``frequency`` is taken
    off once for each time a token stands in the output, and ``presence`` once if it does (OpenAI's
    definition; vLLM counts the output alone, too).
    """
    some = logits[said.rows]
    width = logits.shape[-1]
    cells = said.owners * width + said.tokens
    counts = torch.zeros((2, some.numel()), dtype=torch.int32, device=logits.device)
    counts[0].scatter_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))
    counts[1].scatter_add_(0, cells, said.output.to(torch.int32))
    seen, times = counts[0].view_as(some) > 0, counts[1].view_as(some)
    factor = repetition.to(logits.dtype)[:, None]
    some = torch.where(seen, torch.where(some < 0, some * factor, some / factor), some)
    some -= frequency.to(logits.dtype)[:, None] * times
    some -= presence.to(logits.dtype)[:, None] * (times > 0)
    logits.index_copy_(0, said.rows, some)


def forbid(logits: Tensor, rows: Tensor, tokens: Tensor, wanted: Tensor | None = None) -> None:
    """Set the logits of ``tokens`` in ``rows``, int64 ``[n]``, to -inf; only where ``wanted`` bool ``[n]``."""
    values = torch.full(rows.shape, float("-inf"), dtype=logits.dtype, device=logits.device)
    if wanted is not None:
        values = values.masked_fill(~wanted, 0.0)
    logits.index_put_((rows, tokens), values, accumulate=True)


def allow(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set all logits of ``rows``, int64 ``[n]``, to -inf but those whose bit is set.

    ``masks``: int64 ``[n, ceil(vocab / 64)]``, little-endian: the bit of token t is bit ``t % 8`` of byte
    ``t // 8``.
    """
    octets = masks.view(torch.uint8)  # [n, 8 * words]
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=logits.device)
    allowed = ((octets[:, :, None] & bits) != 0).flatten(1)[:, : logits.shape[-1]]
    logits.index_copy_(0, rows, logits[rows].masked_fill_(~allowed, float("-inf")))


def completes(beginnings: Tensor, ends: Tensor) -> Tensor:
    """Which words a further token would complete: bool ``[n]``.

    ``beginnings``: each word without its last token, ``ends``: what the word's row said last; both int64
    ``[n, width]``, aligned at their end and padded before it with `NO_TOKEN` and `NOTHING`.
    """
    return ((beginnings == NO_TOKEN) | (beginnings == ends)).all(-1)
