"""Rows of a decode batch that begin with the same blocks: forks of one session, or one system prompt.

Made once per step on the host. Knows nothing of sequences: a family is adjacent rows and a length in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .batch import upload


@dataclass(frozen=True, slots=True)
class Families:
    """Which rows share how much. Tensors are int64 on the batch's device.

    ``starts``: ``[families + 1]``, family f is rows ``[starts[f], starts[f + 1])``. ``shared``:
    ``[families]``, tokens that its rows have in common, fewer than any row's context; they stand in the blocks
    of its first row. ``begins``: ``[rows]``, the same by row. On the host: ``longest``, the most tokens
    that any family shares; ``tail``, the most that any row has behind them.
    """

    starts: Tensor
    shared: Tensor
    begins: Tensor
    longest: int
    tail: int


def lay_out_families(
    rows: Sequence[int], shared: Sequence[int], contexts: Sequence[int], device: torch.device
) -> Families:
    """Families of ``rows[f]`` adjacent rows that share ``shared[f]`` tokens; ``contexts`` by row.

    Raises ValueError where a family shares a row's whole context: its last token is its own.
    """
    begins = np.repeat(np.asarray(shared, dtype=np.int64), rows)
    tails = np.asarray(contexts, dtype=np.int64) - begins
    if (tails < 1).any():
        row = int(tails.argmin())
        raise ValueError(f"row {row} has {contexts[row]} tokens and shares {begins[row]}: none is its own")
    starts = np.concatenate(([0], np.cumsum(np.asarray(rows, dtype=np.int64))))
    at, common, by_row = upload([starts, np.asarray(shared, dtype=np.int64), begins], device)
    return Families(at, common, by_row, max(shared, default=0), int(tails.max(initial=0)))
