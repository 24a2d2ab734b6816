"""The torch runner: computes a plan on a device and samples its rows (`sampler`).

On a device that works beside the host ``launch`` only enqueues: inputs go up from pinned memory, sampled ids
stay on the device to feed the next step, and each step, one of moves alone too, is over when its event is.
Holds no policy and no sequence, and asks the scheduler nothing but the masks of grammars.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.batch import PagedBatch
from ...kernels.device import Device, device_of
from ...kvstore.arena import DeviceArena
from ...kvstore.block_mover import BlockMover, Saving
from ..grammar.llguidance import Matchers
from ..model.decoder import Decoder
from ..plan import Outcome, Plan, PlanRow, RowFault, Scored
from ..verbs import TokenLogprob
from .device import device_watched
from .sampler import draw, outcome, prompt_scores, score


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Token ids that one step sampled, on the device: int64 ``[rows]`` in the order of its plan; 0 for a row
    that sampled none."""

    step: int
    ids: Tensor


class TorchRunner:
    """`plan.Runner` over a decoder and ``arenas``, one per KV group; a block id names a block in each of
    them.

    ``mover``: copies blocks to the host tier and back; without one no plan may ask for it. ``device``: what
    the decoder computes on; by default the device on which its
    weights are. ``grammars``: makes the masks of the grammars that plans name
    by number.
    """

    def __init__(
        self,
        decoder: Decoder,
        *arenas: DeviceArena,
        mover: BlockMover | None = None,
        device: Device | None = None,
        grammars: Matchers | None = None,
    ) -> None:
        self._grammars = Matchers() if grammars is None else grammars
        self._device = device or device_of(decoder.device)
        self._decoder = decoder
        self._mover = mover
        self._block_tokens = arenas[0].group.block_tokens
        self._arenas = tuple(arena.kv for arena in arenas)
        nothing = torch.zeros(0, dtype=torch.int64, device=decoder.device)
        # The step launched last, and the one before it that feeds it, also when it is launched again.
        self._last = self._before = _Sampled(-1, nothing)

    def launch(self, plan: Plan) -> TorchHandle:
        """Start a step, and return its handle. Plans with the same step number (parts of one, run again) are
        fed by the same earlier step.

        Raises what torch raises: then no row of this plan has an outcome, and nothing of it runs any more.
        ``EngineDied``: the device is lost.
        """
        with device_watched(self._device), self._device.active(), torch.inference_mode():
            return self._enqueue(plan)

    def _enqueue(self, plan: Plan) -> TorchHandle:
        kernels = self._decoder.kernels
        saving = self._move(plan)
        for arena in self._arenas if plan.copies else ():
            kernels.copy_blocks(arena, (c.source for c in plan.copies), (c.target for c in plan.copies))
        if plan.copies and self._mover is not None:
            self._mover.copied()
        if not plan.rows:
            return TorchHandle(self._device, self._grammars, plan.rows, None, saving)
        before = self._before if plan.step == self._last.step else self._last
        batch = kernels.lay_out(
            self._arenas[0],
            [row.first for row in plan.rows],
            [row.count for row in plan.rows],
            [row.table for row in plan.rows],
            self._device,
        )
        tokens = self._input_ids(plan, before)
        hidden = self._decoder.hidden(tokens, batch, self._arenas)
        drawn = self._draw(plan, hidden, batch, tokens)
        starts = np.cumsum([0, *(row.count for row in plan.rows[:-1])])
        scored = score(plan.rows, starts, hidden, self._decoder.logits, self._device, kernels)
        handle = TorchHandle(self._device, self._grammars, plan.rows, drawn, saving, scored)
        self._before, self._last = before, _Sampled(plan.step, drawn[:, 0])
        return handle

    def _move(self, plan: Plan) -> Saving | None:
        if self._mover is None:
            assert not plan.saves and not plan.loads, "moves, but nothing to move them with"
            return None
        saves = [(save.block, save.slot, save.tokens) for save in plan.saves]
        loads = [(load.slot, load.block) for load in plan.loads]
        return self._mover.move(saves, loads, plan.written(self._block_tokens) if saves else ())

    def _input_ids(self, plan: Plan, before: _Sampled) -> Tensor:
        """The step's token ids, int64 ``[tokens]``: those in the plan, and those that the step ``before``
        samples."""
        waiting = np.zeros(1, dtype=np.int64)
        own = np.concatenate([waiting if row.fed_by is not None else row.tokens for row in plan.rows])
        starts = np.cumsum([0, *(row.count for row in plan.rows)])
        fed = [(starts[at], row.fed_by) for at, row in enumerate(plan.rows) if row.fed_by is not None]
        if not fed:
            return self._device.upload([own])[0]
        places, sources = np.array(fed, dtype=np.int64).T
        ids, to, by = self._device.upload([own, places, sources])
        return ids.index_copy_(0, to, before.ids[by])

    def _draw(self, plan: Plan, hidden: Tensor, batch: PagedBatch, tokens: Tensor) -> Tensor:
        """Sample for the rows that ask for it. Returns the lines that `sampler.draw` makes, int64 ``[rows, 2
        or more]``, for `sampler.outcome`; zeros for the other rows. ``hidden``: ``[tokens, hidden]``;
        ``tokens``: the step's token ids."""
        drawn = np.array([at for at, row in enumerate(plan.rows) if row.sampling is not None], dtype=np.int64)
        if not drawn.size:
            return torch.zeros((len(plan.rows), 2), dtype=torch.int64, device=hidden.device)
        rows = self._device.upload([drawn])[0]
        last = batch.row_starts[rows + 1] - 1
        logits = self._decoder.logits(hidden[last])
        rows_drawn = [plan.rows[at] for at in drawn]
        lines = draw(rows_drawn, logits, tokens[last], self._grammars, self._device, self._decoder.kernels)
        if drawn.size == len(plan.rows):
            return lines
        whole = torch.zeros((len(plan.rows), lines.shape[1]), dtype=torch.int64, device=hidden.device)
        return whole.index_copy_(0, rows, lines)


class TorchHandle:
    """A step in flight. ``outcomes``: what it sampled, on the device; None for a step without rows.
    ``saving``: its saves to the host tier, if they are still running. Made while its device is active, once
    all of the step is enqueued.

    An event is recorded for each step, also for one of copies alone: before a loaded slot is freed, or such a
    step is timed, the copies must be done.
    """

    def __init__(
        self,
        device: Device,
        grammars: Matchers,
        rows: tuple[PlanRow, ...],
        outcomes: Tensor | None,
        saving: Saving | None = None,
        scored: Tensor | None = None,
    ) -> None:
        self._device = device
        self._grammars = grammars
        self._rows = rows
        self._outcomes = None if outcomes is None else device.fetch(outcomes)
        self._scored = None if scored is None else device.fetch(scored)
        self._saving = saving
        self._done = device.current().record()

    def tokens(self) -> list[Outcome]:
        """Wait for the step. Returns the outcomes, one for each of the plan's rows in order; none for a plan
        without rows."""
        with device_watched(self._device):
            self._done.wait()
            if self._saving is not None:
                self._saving.wait()
        if self._outcomes is None:
            return []
        lines = zip(self._rows, self._outcomes.tolist(), strict=True)
        found = [outcome(row, line, self._grammars) for row, line in lines]
        if self._scored is None:
            return found
        prompts = prompt_scores(self._rows, self._scored.numpy())
        return [_with_prompt(one, scores) for one, scores in zip(found, prompts, strict=True)]


def _with_prompt(found: Outcome, scores: list[TokenLogprob]) -> Outcome:
    if not scores or isinstance(found, RowFault):
        return found
    tokens, logprobs = (found.tokens, found.logprobs) if isinstance(found, Scored) else (found, [])
    return Scored(tokens, logprobs, scores)
