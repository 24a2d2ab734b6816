"""What adapters (LoRA) add to the product of a linear map: pairs of thin matrices, in slots.

A slot holds the pairs of one adapter. The slots are made once, with room for the highest rank, so that a step
on a GPU can be captured: it reads slots, and an adapter is copied into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

RANK_STEP = 16
"""The room of a slot, and the rank that is computed, are multiples of it: the size of the kernels' tiles. What
is between an adapter's rank and the next multiple is zero."""


DEPTH_STEP = 4
STRIP = 64
"""So many columns of `LowRank.b` lie together; its ``a`` has so many lines, or a multiple."""


def strips_of(width: int) -> int:
    """How many strips hold ``width`` columns."""
    return -(-width // STRIP)


def padded_rank(rank: int) -> int:
    """``rank``, rounded up to a multiple of `RANK_STEP`."""
    return -(-rank // RANK_STEP) * RANK_STEP


@dataclass(frozen=True, slots=True)
class Pair:
    """The pair of one adapter for one part of a map: ``a`` ``[in, rank]``, ``b`` ``[rank, width]``, in which
    the adapter's scale is. It adds ``x @ a @ b`` to the part's columns."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The slots of one linear map, from ``in`` to ``out`` numbers. The columns of its product are cut into
    parts, one behind the other, as where q, k and v are computed together; each part has a pair of its own.

    ``a``: ``[slots, parts, in, rank]``, with zeros behind ``in`` up to a multiple of `DEPTH_STEP`. ``b``:
    ``[slots, strips, rank, STRIP]``: the columns of each part in strips, the last of which may be filled up, so
    that memory is read in one direction. ``ranks``: int64 ``[slots, parts]``, how much of the rank is used, a
    multiple of `RANK_STEP`; 0: the slot adds nothing to the part. ``starts``: int64 ``[parts + 1]``, the first
    column of each part, and ``out``. ``width``: ``in``; ``widths``: the columns of each part.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    starts: Tensor
    width: int
    widths: tuple[int, ...]

    @classmethod
    def empty(cls, slots: int, rank: int, width: int, widths: Sequence[int], like: Tensor) -> LowRank:
        """Slots that add nothing, for adapters of ``rank`` at most. ``width``: ``in``; ``like``: a tensor of
        the type and device."""
        (made,) = cls.several(slots, rank, [(width, widths)], like)
        return made

    @classmethod
    def several(
        cls, slots: int, rank: int, maps: Sequence[tuple[int, Sequence[int]]], like: Tensor
    ) -> list[LowRank]:
        """The same for several maps, of each ``in`` and the parts' columns, one behind the other in memory."""
        room = padded_rank(rank)
        shapes: list[tuple[int, ...]] = []
        for width, widths in maps:
            shapes.append((slots, len(widths), -(-width // DEPTH_STEP) * DEPTH_STEP, room))
            shapes.append((slots, sum(map(strips_of, widths)), room, STRIP))
        sizes = list(map(prod, shapes))
        cut = torch.split(like.new_zeros(sum(sizes)), sizes)
        tensors = [piece.view(shape) for piece, shape in zip(cut, shapes, strict=True)]
        return [
            cls(
                a=a,
                b=b,
                ranks=torch.zeros((slots, len(widths)), dtype=torch.int64, device=like.device),
                starts=torch.tensor([0, *accumulate(widths)], dtype=torch.int64, device=like.device),
                width=width,
                widths=tuple(widths),
            )
            for (width, widths), a, b in zip(maps, tensors[0::2], tensors[1::2], strict=True)
        ]

    @property
    def room(self) -> int:
        """The highest rank that fits."""
        return int(self.a.shape[3])

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
        used = [0 if pair is None else padded_rank(len(pair.b)) for pair in pairs]
        for part, pair in enumerate(pairs):
            if pair is None:
                continue
            rank, strips = len(pair.b), self._strips(slot, part)
            self.a[slot, part, : len(pair.a), :rank].copy_(pair.a, non_blocking=True)
            self.a[slot, part, :, rank : used[part]] = 0
            whole = pair.b.shape[1] // STRIP
            cut = pair.b[:, : whole * STRIP].view(rank, whole, STRIP).transpose(0, 1)
            strips[:whole, :rank].copy_(cut, non_blocking=True)
            if whole < len(strips):
                left = pair.b.shape[1] - whole * STRIP
                strips[whole, :rank, :left].copy_(pair.b[:, whole * STRIP :], non_blocking=True)
            strips[:, rank : used[part]] = 0
        for part, rank in enumerate(used):
            self.ranks[slot, part] = rank
