"""The plan: what one step computes, as plain data that could cross a process.

Scheduler and runner share nothing else: no tensors, no policy, no live objects. The runner asks nothing back
but the masks of grammars, by the numbers in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .verbs import Sampling, TokenLogprob

NO_SEQUENCE = -1
"""The sequence number of a row that warms up kernels: it belongs to no sequence."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """``count`` tokens of one sequence, computed at positions ``[first, first + count)``.

    ``tokens``: their ids, int64 ``[count]``; where ``fed_by`` is set the row has one token, the one that row
    ``fed_by`` of the *previous* step samples (it stays on the device), and ``tokens`` is empty.
    ``table``: block ids, int32 ``[ceil((first + count) / block_tokens)]``, a copy.
    ``sampling``: how to draw the token at position ``first + count``; None for a chunk that needs no draw.
    ``past``, where ``sampling.reads_past``: ids of all tokens before the row's last one, int32
    ``[first + count - 1]``, a copy; from ``output_from`` on they were generated.
    ``forbidden``: ids that may not be drawn now. ``grammar``: the number of the grammar that the draw follows;
    its owner makes the mask (`Matchers`) before ``launch`` returns, while the device computes.
    ``scored``: ids of the tokens behind the positions from ``scored_from`` on, of which log probabilities are
    wanted, with ``scored_top`` alternatives; int64; None where none are.
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
    grammar: int | None = None
    scored: NDArray[np.int64] | None = None
    scored_from: int = 0
    scored_top: int = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a whole block to another one, before the step's rows. A plan's copies are made in the order
    given."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockSave:
    """Copy a block into a host slot; the part behind its first ``tokens`` tokens becomes zeros.

    It may run beside the rows, but reads what stood there before this plan: it comes after the loads and
    copies of earlier plans to ``block``, and before any load, copy or row of this plan or a later one that
    writes it. Its tokens were computed by finished steps. It is done when ``Handle.tokens`` returns.
    ``spare``: the slot is the first to be evicted, as the block has a copy or is not wanted; the runner
    ignores it.
    """

    block: int
    slot: int
    tokens: int
    spare: bool = False


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Copy a host slot into a block, before the step's block copies and rows."""

    slot: int
    block: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, number ``step``: saves, loads and copies of blocks, in this order, then rows. It may have no
    rows."""

    step: int
    rows: tuple[PlanRow, ...]
    copies: tuple[BlockCopy, ...] = ()
    saves: tuple[BlockSave, ...] = ()
    loads: tuple[BlockLoad, ...] = ()

    def written(self, block_tokens: int) -> set[int]:
        """The ids of the blocks that the plan's loads, copies and rows write."""
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

    ``code`` names a class of ``runtime.errors``, if there is one for it.
    """

    message: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """Sampled ids and their log probabilities, one each, where ``sampling.logprobs`` asks for them.
    ``prompt``: the log probabilities of the row's ``scored`` tokens."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt: list[TokenLogprob] = field(default_factory=list)


Outcome: TypeAlias = list[int] | Scored | RowFault
"""What a row of a step gave: the sampled ids in order (none, if it was to sample none), with log
probabilities if asked for, or a fault."""


class Handle(Protocol):
    """A step in flight."""

    def tokens(self) -> list[Outcome]:
        """Wait until the step is done. Returns its outcomes, one for each of ``plan.rows`` in order."""
        ...


class Runner(Protocol):
    """Computes plans on a device."""

    def launch(self, plan: Plan) -> Handle:
        """Start a step; on a GPU it returns before the step is done.

        What this or ``tokens`` raises fails the whole step, of which nothing runs any more then; `EngineDied`
        says that the device is lost.
        """
        ...
