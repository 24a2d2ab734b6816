"""The plan: what one step computes, as plain data between scheduler and runner.

No tensors, no policy. The runner asks nothing back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .grammar.matcher import Matcher
from .link.messages import Sampling, TokenLogprob

NOBODY = -1
"""The sequence of a row that is computed for nobody, before there are any."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """``count`` tokens of one sequence, computed at positions ``[first, first + count)``.

    ``tokens``: their ids, int64 ``[count]``; where ``fed_by`` is set the row has one token, the one that row
    ``fed_by`` of the *previous* step samples (it stays on the device), and ``tokens`` is empty.
    ``table``: block ids, int32 ``[>= ceil((first + count) / block_tokens)]``; valid until ``launch`` returns.
    ``sampling``: how to draw the token at position ``first + count``; None for a chunk that needs no draw.
    ``past``, where ``sampling.reads_past``: ids of all tokens before the row's last one, int32
    ``[first + count - 1]``, valid until ``launch`` returns; from ``output_from`` on they were generated.
    ``forbidden``: ids that may not be drawn now. ``matcher``: tells those that the row's grammar allows, asked
    before ``launch`` returns, so that it can be while the device computes.
    """

    seq: int
    epoch: int
    first: int
    count: int
    tokens: NDArray[np.int64]
    table: NDArray[np.int32]
    sampling: Sampling | None = None
    fed_by: int | None = None
    past: NDArray[np.int32] | None = None
    output_from: int = 0
    forbidden: tuple[int, ...] = ()
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a whole block, before the step's rows, in the order given."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockSave:
    """Copy a block into a host slot, its slots behind the first ``tokens`` as zeros.

    It may run beside the rows, but reads what stood there before this plan: it comes before any load, copy or
    row of this plan or a later one that writes ``block``. Done when ``tokens()`` returns. ``spare``: first to
    give way there, as the block is kept, too, or wanted by nobody; of no concern to who copies.
    """

    block: int
    slot: int
    tokens: int
    spare: bool = False


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Copy a host slot into a block, before the step's copies and rows."""

    slot: int
    block: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: saves, loads and copies first, then rows. It may have moves only."""

    step: int
    rows: tuple[PlanRow, ...]
    copies: tuple[BlockCopy, ...] = ()
    saves: tuple[BlockSave, ...] = ()
    loads: tuple[BlockLoad, ...] = ()

    def written(self, block_tokens: int) -> set[int]:
        """Blocks that its loads, copies and rows write."""
        blocks = {load.block for load in self.loads} | {copy.target for copy in self.copies}
        for row in self.rows:
            end = row.first + row.count
            blocks.update(row.table[row.first // block_tokens : -(-end // block_tokens)].tolist())
        return blocks

    @property
    def tokens(self) -> int:
        """Tokens computed by this step."""
        return sum(row.count for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowFault:
    """This row alone failed (not-a-number logits, an exception); the other rows are good.

    ``code`` names a class of ``runtime.errors``, if one says it.
    """

    message: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sampled id and its log probability, where the row's ``sampling.logprobs`` asks for it."""

    token: int
    logprob: TokenLogprob


Outcome = int | Scored | RowFault | None
"""Per row: the sampled id, a fault, or None where nothing was to be drawn."""


class Handle(Protocol):
    """A step in flight."""

    def tokens(self) -> list[Outcome]:
        """Wait for the step; outcomes aligned with ``plan.rows``."""
        ...


class Runner(Protocol):
    """Computes plans on a device."""

    def launch(self, plan: Plan) -> Handle:
        """Start a step; on a GPU returns before it is done. ``table`` and ``tokens`` are read by then.

        What this or ``tokens`` raises fails the whole step; `EngineDied` says that the device is lost.
        """
        ...
