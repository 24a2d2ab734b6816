"""The torch runner: computes a plan on a device and samples its rows.

On CUDA ``launch`` only enqueues: inputs go up from pinned memory, sampled ids stay on the device to feed the
next step, and come down behind an event. Holds no policy, no sequence; asks the scheduler nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.batch import PagedBatch, upload
from ..kernels.sampling import sample
from ..kvstore.arena import DeviceArena
from .model.decoder import Decoder
from .plan import Outcome, Plan, PlanRow, RowFault

_WORD64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Token ids of one step on the device, int64 ``[rows]``, as its plan's rows; 0 where none was drawn."""

    step: int
    ids: Tensor


class TorchRunner:
    """`plan.Runner` over a decoder and its KV groups' arenas; a block id names a block in each of them."""

    def __init__(self, decoder: Decoder, *arenas: DeviceArena) -> None:
        self._decoder = decoder
        self._arenas = tuple(arena.kv for arena in arenas)
        nothing = torch.zeros(0, dtype=torch.int64, device=decoder.device)
        # The step launched last, and the one before it that feeds it; so too when it is launched again.
        self._last = self._before = _Sampled(-1, nothing)

    def launch(self, plan: Plan) -> TorchHandle:
        """Start a step. Plans with the same step number (parts of one, run again) read the same earlier step.

        Raises whatever torch does: then no row of this plan has an outcome.
        """
        with torch.inference_mode():
            kernels = self._decoder.kernels
            for arena in self._arenas if plan.copies else ():
                kernels.copy_blocks(arena, (c.source for c in plan.copies), (c.target for c in plan.copies))
            if not plan.rows:
                return TorchHandle(plan.rows, None)
            if plan.step != self._last.step:
                self._before = self._last
            batch = kernels.lay_out(
                self._arenas[0],
                [row.first for row in plan.rows],
                [row.count for row in plan.rows],
                [row.table for row in plan.rows],
            )
            hidden = self._decoder.hidden(self._input_ids(plan), batch, self._arenas)
            ids, sound = self._draw(plan, hidden, batch)
            self._last = _Sampled(plan.step, ids)
            return TorchHandle(plan.rows, torch.stack((ids, sound)))

    def _input_ids(self, plan: Plan) -> Tensor:
        """The step's token ids, int64 ``[tokens]``: the plan's own, and those the step before samples."""
        waiting = np.zeros(1, dtype=np.int64)
        own = np.concatenate([waiting if row.fed_by is not None else row.tokens for row in plan.rows])
        starts = np.cumsum([0, *(row.count for row in plan.rows)])
        fed = [(starts[at], row.fed_by) for at, row in enumerate(plan.rows) if row.fed_by is not None]
        if not fed:
            return upload([own], self._decoder.device)[0]
        places, sources = np.array(fed, dtype=np.int64).T
        ids, to, by = upload([own, places, sources], self._decoder.device)
        return ids.index_copy_(0, to, self._before.ids[by])

    def _draw(self, plan: Plan, hidden: Tensor, batch: PagedBatch) -> tuple[Tensor, Tensor]:
        """Per row the id drawn and whether its logits are finite, both int64 ``[rows]``."""
        drawn = np.array([at for at, row in enumerate(plan.rows) if row.sampling is not None], dtype=np.int64)
        ids = torch.zeros(len(plan.rows), dtype=torch.int64, device=hidden.device)
        sound = torch.ones_like(ids)
        if drawn.size:
            rows = upload([drawn], hidden.device)[0]
            logits = self._decoder.logits(hidden[batch.row_starts[rows + 1] - 1])
            ids.index_copy_(0, rows, _choose([plan.rows[at] for at in drawn], logits))
            # The sum of finite fp32 logits is finite, and of any others it is not: one pass, no mask.
            sound.index_copy_(0, rows, logits.sum(-1).isfinite().long())
        return ids, sound


def _choose(rows: list[PlanRow], logits: Tensor) -> Tensor:
    """The next token of each row, int64 ``[rows]``: greedy without the machinery where all rows are."""
    asked = [row.sampling for row in rows if row.sampling is not None]
    vocab = logits.shape[-1]
    if all(one.temperature <= 0 for one in asked):
        return logits.argmax(-1)
    warm = [one for one in asked if one.temperature > 0 and (one.top_k or one.top_p < 1)]
    candidates = max((one.top_k or vocab for one in warm), default=0)
    integers = np.array([[min(one.top_k, vocab) for one in asked], [row.first + row.count for row in rows]])
    seeds = np.array([one.seed & _WORD64 for one in asked], dtype=np.uint64).view(np.int64)
    reals = np.array([[one.temperature for one in asked], [one.top_p for one in asked]]).view(np.int64)
    whole, seeds_up, bits = upload([integers, seeds, reals], logits.device)
    temperature, top_p = bits.view(torch.float64)
    return sample(logits, temperature, whole[0], top_p, seeds_up, whole[1], candidates=candidates)


class TorchHandle:
    """A step in flight: outcomes come down behind an event on CUDA, and are there at once elsewhere."""

    def __init__(self, rows: tuple[PlanRow, ...], outcomes: Tensor | None) -> None:
        self._rows = rows
        self._outcomes = outcomes
        self._done: torch.cuda.Event | None = None
        if outcomes is not None and outcomes.device.type == "cuda":
            self._outcomes = torch.empty(outcomes.shape, dtype=outcomes.dtype, pin_memory=True)
            self._outcomes.copy_(outcomes, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def tokens(self) -> list[Outcome]:
        """Wait for the step; outcomes aligned with the plan's rows."""
        if self._done is not None:
            self._done.synchronize()
        if self._outcomes is None:
            return []
        ids, sound = self._outcomes.tolist()
        return [_outcome(*one) for one in zip(self._rows, ids, sound, strict=True)]


def _outcome(row: PlanRow, token: int, sound: int) -> Outcome:
    if row.sampling is None:
        return None
    return token if sound else RowFault(f"sequence {row.seq}: logits are not finite")
