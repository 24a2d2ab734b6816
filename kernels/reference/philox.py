"""Philox4x32-10, a counter-based random generator: its numbers depend on (seed, position) only.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); constants and
known answers from the Random123 library. Works on int64 tensors on any device, without state.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Four random 32-bit words for each of n columns: ``counter`` ``[4, n]`` and ``key`` ``[2, n]`` to ``[4,
    n]``.

    All are int64 tensors that hold unsigned 32-bit words. Products wrap in int64 and keep all 64 bits.
    """
    multipliers, steps = _column(MULTIPLIERS, counter.device), _column(KEY_STEPS, counter.device)
    even, odd = counter[0::2], counter[1::2]
    for turn in range(ROUNDS):
        product = even * multipliers
        low, high = product & _WORD, (product >> 32) & _WORD
        even, odd = high.flip(0) ^ odd ^ ((key + turn * steps) & _WORD), low.flip(0)
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def _column(pair: tuple[int, int], device: torch.device) -> Tensor:
    """Two constants as an int64 tensor ``[2, 1]``, computed on the device, as a copy would wait for it."""
    first, second = pair
    return torch.arange(2, device=device)[:, None] * (second - first) + first


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One uniform number in [0, 1) for each (seed, position): float64 with 53 random bits.

    ``seeds``, ``positions``: int64 ``[n]``, read as unsigned. The seed is the key, the position the counter's
    low half.
    """
    key = torch.stack((seeds & _WORD, (seeds >> 32) & _WORD))
    low, high = positions & _WORD, (positions >> 32) & _WORD
    zero = torch.zeros_like(low)
    words = philox(torch.stack((low, high, zero, zero)), key)
    return ((words[0] << 21) | (words[1] >> 11)).to(torch.float64) * 2.0**-53
