"""Edits of logits before the temperature: bias, penalties for earlier tokens, forbidden tokens, grammar
masks.

All work in place on fp32 ``[rows, vocab]`` and do not wait for the device. Apply them in the order of
transformers' processors: `add`, `penalize`, `forbid`, and `allow` last.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_TOKEN = -1
"""Pads a shorter forbidden word at its beginning, in `completes`; matches any token."""

NOTHING = -2
"""Pads a row with fewer tokens at its beginning, in `completes`; matches no token of a word."""


def add(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add a bias to single logits, in place: ``values`` float ``[n]`` to the logits of ``tokens`` in
    ``rows``, both int64 ``[n]``."""
    logits.index_put_((rows, tokens), values.to(logits.dtype), accumulate=True)


def count(tally: Tensor, lines: Tensor, tokens: Tensor, output: Tensor) -> None:
    """Count tokens into a tally, int32 ``[lines, vocab]``, in place: a cell has bit 0 set if its token occurs
    at all, and 2 more for each time that it is in the output.

    ``lines``, ``tokens``: int64 ``[n]``, the line and id of each token. ``output``: int64 ``[n]``, 1 for a
    token sampled in this turn, 0 for the prompt.
    """
    cells, flat = lines * tally.shape[-1] + tokens, tally.view(-1)
    flat.index_add_(0, cells, (output * 2).to(torch.int32))
    flat[cells] |= 1


def penalize(
    logits: Tensor,
    rows: Tensor,
    tally: Tensor,
    lines: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Apply penalties for earlier tokens to ``rows`` (int64 ``[n]``) of ``logits`` fp32 ``[rows, vocab]``, in
    place. ``tally``: of `count`; ``lines``: the line of each row in it, int64 ``[n]``. ``repetition``,
    ``frequency``, ``presence``: float ``[n]``.

    ``repetition`` (1: none) divides the logit of each token of prompt and output if it is positive and
    multiplies it otherwise (Keskar et al., CTRL, 2019; transformers' processor). Then ``frequency`` is
    subtracted once for each time a token is in the output, and ``presence`` once if it is (OpenAI's
    definition; vLLM counts only the output, too).
    """
    some, cells = logits[rows], tally[lines]
    times, factor = cells >> 1, repetition.to(logits.dtype)[:, None]
    some = torch.where(cells > 0, torch.where(some < 0, some * factor, some / factor), some)
    some -= frequency.to(logits.dtype)[:, None] * times
    some -= presence.to(logits.dtype)[:, None] * (times > 0)
    logits.index_copy_(0, rows, some)


def forbid(logits: Tensor, rows: Tensor, tokens: Tensor, wanted: Tensor | None = None) -> None:
    """Set the logits of ``tokens`` in ``rows``, both int64 ``[n]``, to -inf, in place; if ``wanted`` (bool
    ``[n]``) is given, only those with True."""
    values = torch.full(rows.shape, float("-inf"), dtype=logits.dtype, device=logits.device)
    if wanted is not None:
        values = values.masked_fill(~wanted, 0.0)
    logits.index_put_((rows, tokens), values, accumulate=True)


def allow(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set all logits of ``rows``, int64 ``[n]``, to -inf except those with their bit set, in place.

    ``masks``: int64 ``[n, ceil(vocab / 64)]``, little-endian: the bit of token t is bit ``t % 8`` of byte ``t
    // 8``.
    """
    octets = masks.view(torch.uint8)  # [n, 8 * words]
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=logits.device)
    allowed = ((octets[:, :, None] & bits) != 0).flatten(1)[:, : logits.shape[-1]]
    logits.index_copy_(0, rows, logits[rows].masked_fill_(~allowed, float("-inf")))


def completes(beginnings: Tensor, ends: Tensor) -> Tensor:
    """Which forbidden words (several tokens long) one more token would complete: bool ``[n]``.

    ``beginnings``: each word without its last token. ``ends``: the last tokens of the row that the word is
    forbidden in. Both are int64 ``[n, width]``, right-aligned, padded with `NO_TOKEN` and `NOTHING`.
    """
    return ((beginnings == NO_TOKEN) | (beginnings == ends)).all(-1)
