"""What adapters (LoRA) add to the product of a linear map: pairs of thin matrices, in slots.

A slot holds the pairs of one adapter. The slots are made once, with room for the highest rank, so that a step
on a GPU can be captured: it reads slots, and an adapter is copied into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RANK_STEP = 16
"""The room of a slot, and the rank that is computed, are multiples of it: the size of the kernels' tiles. What
is between an adapter's rank and the next multiple is zero."""


STRIP = 64
"""So many columns of `LowRank.b` lie together."""


def strips_of(width: int) -> int:
    """How many strips hold ``width`` columns."""
    return -(-width // STRIP)


def padded_rank(rank: int) -> int:
    """``rank``, rounded up to a multiple of `RANK_STEP`."""
    return -(-rank // RANK_STEP) * RANK_STEP


@dataclass(frozen=True, slots=True)
class Pair:
    """The pair of one adapter for one part of a map: ``a`` ``[rank, in]``, ``b`` ``[rank, width]``, in which
    the adapter's scale is. It adds ``x @ a.T @ b`` to the part's columns."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The slots of one linear map, from ``in`` to ``out`` numbers. The columns of its product are cut into
    parts, one behind the other, as where q, k and v are computed together; each part has a pair of its own.

    ``a``: ``[slots, parts, rank, in]``. ``b``: ``[slots, strips, rank, STRIP]``: the columns of each part in
    strips, the last of which may be filled up, so that memory is read in one direction. ``ranks``: int64
    ``[slots, parts]``, how much of the rank is used, a multiple of `RANK_STEP`; 0: the slot adds nothing to the
    part. ``starts``: int64 ``[parts + 1]``, the first column of each part, and ``out``. ``widths``: the columns
    of each part.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    starts: Tensor
    widths: tuple[int, ...]

    @classmethod
    def empty(cls, slots: int, rank: int, width: int, widths: Sequence[int], like: Tensor) -> LowRank:
        """Slots that add nothing, for adapters of ``rank`` at most. ``width``: ``in``; ``like``: a tensor of
        the type and device."""
        room = padded_rank(rank)
        starts = [sum(widths[:part]) for part in range(len(widths) + 1)]
        return cls(
            a=like.new_zeros((slots, len(widths), room, width)),
            b=like.new_zeros((slots, sum(map(strips_of, widths)), room, STRIP)),
            ranks=torch.zeros((slots, len(widths)), dtype=torch.int64, device=like.device),
            starts=torch.tensor(starts, dtype=torch.int64, device=like.device),
            widths=tuple(widths),
        )

    @property
    def bytes(self) -> int:
        """What the slots take."""
        return sum(one.numel() * one.itemsize for one in (self.a, self.b, self.ranks))

    def b_of(self, slot: int, part: int, rank: int) -> Tensor:
        """``b`` of one part in one slot, as a new tensor ``[rank, width]``."""
        strips = self._strips(slot, part)[:, :rank]
        return strips.transpose(0, 1).reshape(rank, len(strips) * STRIP)[:, : self.widths[part]]

    def _strips(self, slot: int, part: int) -> Tensor:
        first = sum(map(strips_of, self.widths[:part]))
        return self.b[slot, first : first + strips_of(self.widths[part])]

    def fill(self, slot: int, pairs: Sequence[Pair | None]) -> None:
        """Put the pairs of an adapter into a slot, in place of what it holds. ``pairs``: of each part; None: it
        adds nothing there."""
        used = [0 if pair is None else padded_rank(len(pair.a)) for pair in pairs]
        for part, pair in enumerate(pairs):
            if pair is None:
                continue
            rank, strips = len(pair.a), self._strips(slot, part)
            self.a[slot, part, :rank].copy_(pair.a, non_blocking=True)
            self.a[slot, part, rank : used[part]] = 0
            whole = pair.b.shape[1] // STRIP
            cut = pair.b[:, : whole * STRIP].view(rank, whole, STRIP).transpose(0, 1)
            strips[:whole, :rank].copy_(cut, non_blocking=True)
            if whole < len(strips):
                left = pair.b.shape[1] - whole * STRIP
                strips[whole, :rank, :left].copy_(pair.b[:, whole * STRIP :], non_blocking=True)
            strips[:, rank : used[part]] = 0
        for part, rank in enumerate(used):
            self.ranks[slot, part] = rank
