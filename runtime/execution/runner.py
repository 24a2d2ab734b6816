"""The torch runner: computes a plan on a device and samples its rows (`sampler`).

On a device that works beside the host ``launch`` only enqueues: inputs go up from pinned memory, sampled ids
stay on the device to feed the next step, and each step is over when its event is. Its saves and loads have
events of their own, and a step waits for those of the blocks that it uses.
Holds no policy and no sequence, and asks the scheduler nothing but the masks of grammars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...kernels.device import Device, device_of
from ...kvstore.arena import DeviceArena
from ...kvstore.block_mover import BlockMover, Moving
from ..grammar.llguidance import Matchers
from ..model.decoder import Decoder
from ..plan import Ints, Outcomes, Plan
from ..settings import StepSize
from .adapter_store import AdapterStore
from .batch import SOME_CAPACITY, Batch, Capacity
from .device import device_watched
from .device_step import DeviceStep
from .sampler import Sampler, with_prompt_scores

Drawing: TypeAlias = Callable[[], Tensor]
"""Draws for the rows of a step, once these are computed: the lines that `Sampler.draw` makes, int64 ``[draws, 2
or more]``."""
NO_LINES = np.empty((0, 2), dtype=np.int64)


class TorchRunner:
    """`plan.Runner` over a decoder and ``arena``, which has the blocks of all KV groups.

    ``mover``: copies blocks to the host tier and back; without one no plan may ask for it. ``device``: what
    the decoder computes on; by default the device on which its
    weights are. ``grammars``: makes the masks of the grammars that plans name
    by number. ``capacity``: for what there is room from the start. ``adapters``: those that plans name by
    number; None: none are.
    """

    def __init__(
        self,
        decoder: Decoder,
        arena: DeviceArena,
        *,
        mover: BlockMover | None = None,
        device: Device | None = None,
        grammars: Matchers | None = None,
        capacity: Capacity = SOME_CAPACITY,
        adapters: AdapterStore | None = None,
    ) -> None:
        self._adapters = adapters
        self._device = device or device_of(decoder.device)
        self._decoder = decoder
        self._mover = mover
        self._block_tokens = arena.group.block_tokens
        self._arena = arena.kv
        self._batch = Batch(replace(capacity, groups=decoder.groups))
        grammars = Matchers() if grammars is None else grammars
        self._sampler = Sampler(self._batch, grammars, self._device, decoder.kernels)
        self._step: DeviceStep | None = None
        if decoder.kernels.by_slot:
            self._step = DeviceStep(decoder, arena.kv, self._device, self._batch, capacity)
        self._ids = torch.zeros(len(self._batch), dtype=torch.int64, device=decoder.device)
        """On the device, the id that each slot drew last."""

    def launch(self, plan: Plan) -> TorchHandle:
        """Start a step, and return its handle.

        Raises what torch raises: then no row of this plan has an outcome, and nothing of it runs any more.
        ``EngineDied``: the device is lost.
        """
        with device_watched(self._device), self._device.active(), torch.inference_mode():
            return self._enqueue(plan)

    def _enqueue(self, plan: Plan) -> TorchHandle:
        kernels = self._decoder.kernels
        self._batch.apply(plan)
        for fill in plan.fills:
            assert self._adapters is not None, "an adapter, but none are held"
            self._adapters.fill(fill.slot, fill.number)
        moving = self._move(plan)
        if plan.copies:
            targets = [copy.target for copy in plan.copies]
            kernels.copy_blocks(self._arena, [copy.source for copy in plan.copies], targets, self._device)
            if self._mover is not None:
                self._mover.copied(targets)
        each, back = _draws(plan)
        drawing, scored = self._compute(plan, each, back) if len(plan) else (None, None)
        wanted = self._batch.scores[plan.slots]
        return TorchHandle(self._device, self._sampler, plan, each, wanted, drawing, scored, moving)

    def capture(
        self,
        sizes: Iterable[StepSize],
        progress: Callable[[StepSize], None] = lambda _: None,
        *,
        now: bool = True,
    ) -> None:
        """Have steps of these sizes captured (`DeviceStep.capture`); does nothing where a step is laid out on
        the host."""
        if self._step is not None:
            with device_watched(self._device), self._device.active(), torch.inference_mode():
                self._step.capture(sizes, progress, now=now)

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return 0 if self._step is None else self._step.captured

    # What draws is no closure: the frame of one that raised would keep the step's memory.

    def _compute(self, plan: Plan, each: Ints, back: Ints) -> tuple[Drawing, Tensor | None]:
        """Compute the rows of a plan; ``each``, ``back``: its `_draws`. Returns what draws for them, and what
        `Sampler.score` makes."""
        if self._step is not None:
            found = self._step.launch(plan, each, back)
            scored = None if found is None else self._sampler.score(plan, found, self._decoder.logits)
            return partial(self._draw_on_device, self._step, plan, each), scored
        # The backend is given its layout by the host.
        widths = -(-(plan.firsts + plan.counts) // self._block_tokens)
        tables = self._batch.contexts(plan.slots, widths)
        lay_out = self._decoder.kernels.lay_out
        batches = [lay_out(self._arena, plan.firsts, plan.counts, one, self._device) for one in tables]
        if plan.adapters is not None:
            (adapters,) = self._device.upload([np.repeat(plan.adapters, plan.counts)])
            batches = [replace(batch, adapters=adapters) for batch in batches]
        tokens = self._input_ids(plan)
        hidden = self._decoder.hidden(tokens, batches, self._arena)
        scored = self._sampler.score(plan, hidden, self._decoder.logits)
        ends = batches[0].context_lengths
        return partial(self._draw_on_host, plan, each, back, tokens, hidden, ends), scored

    def _draw_on_device(self, step: DeviceStep, plan: Plan, each: Ints) -> Tensor:
        if not plan.asks and not self._batch.special[plan.slots].any():
            return step.draw(len(each))
        chosen = self._sampler.rows(plan.slots[each])
        hidden, last, positions = step.computed(len(each))
        lines = self._sampler.draw(plan, chosen, each, positions, self._decoder.logits(hidden), last)
        step.keep(lines[:, 0])
        return lines

    def _draw_on_host(
        self, plan: Plan, each: Ints, back: Ints, last: Tensor, hidden: Tensor, positions: Tensor
    ) -> Tensor:
        """``last``, ``hidden``: all tokens and the states behind them; ``positions``: behind each row's."""
        chosen = self._sampler.rows(plan.slots[each])
        if not plan.draws_one_each or plan.size > len(plan):
            behind = np.cumsum(plan.counts)[each] - 1 - back
            at, positions = self._device.upload([behind, (plan.firsts + plan.counts)[each] - back])
            hidden, last = hidden[at], last[at]
        lines = self._sampler.draw(plan, chosen, each, positions, self._decoder.logits(hidden), last)
        if (more := len(self._batch) - len(self._ids)) > 0:
            self._ids = torch.nn.functional.pad(self._ids, (0, more))
        if not plan.drafts:  # what follows a guess is not known here: the row behind it is not fed
            self._ids.index_copy_(0, chosen.slots, lines[:, 0])
        return lines

    def _move(self, plan: Plan) -> Moving | None:
        if self._mover is None:
            assert not plan.saves and not plan.loads, "moves, but nothing to move them with"
            return None
        saves = [(save.block, save.slot, save.tokens) for save in plan.saves]
        loads = [(load.slot, load.block) for load in plan.loads]
        moving = self._mover.move(saves, loads)
        if self._mover.busy:
            written = self._batch.written(plan, self._block_tokens)
            read = self._batch.read(plan, self._block_tokens) if self._mover.loading else written
            self._mover.follow(read, written)
        return moving

    def _input_ids(self, plan: Plan) -> Tensor:
        """The step's token ids, int64 ``[tokens]``: those in the plan, and those that slots drew last."""
        if not plan.fed.any():
            return self._device.upload([plan.tokens])[0]
        if plan.fed.all():
            return self._ids[self._sampler.rows(plan.slots).slots]
        indexes = (np.cumsum(plan.counts) - plan.counts)[plan.fed]
        own = np.zeros(plan.size, dtype=np.int64)
        own[~np.repeat(plan.fed, plan.counts)] = plan.tokens
        ids, to, by = self._device.upload([own, indexes, plan.slots[plan.fed]])
        return ids.index_copy_(0, to, self._ids[by])


def _draws(plan: Plan) -> tuple[Ints, Ints]:
    """For each token that a plan draws, the number of its row, and how many of the row's tokens stand behind
    the one after which it is drawn: none, but where tokens are guessed."""
    rows = np.flatnonzero(plan.draws)
    if not plan.drafts:
        return rows, np.zeros(len(rows), dtype=np.int64)
    draws = np.array([1 + plan.drafts.get(row, 0) for row in rows.tolist()], dtype=np.int64)
    each = np.repeat(rows, draws)
    return each, np.repeat(np.cumsum(draws), draws) - 1 - np.arange(len(each))


@dataclass(eq=False)
class TorchHandle:
    """A step in flight. ``each``, ``wanted``: as for `Sampler.outcomes`. ``drawing``: enqueues what it draws;
    None for a step without rows. ``scored``: what `Sampler.score` makes. ``moving``: its saves and loads,
    if they run beside it.
    Made while its device is active, once all before the draw is enqueued; the draw is, too, unless it waits
    for `draw`.

    An event is recorded for each step, also for one of copies alone: their targets may be used again once it
    is over.
    """

    _device: Device
    _sampler: Sampler
    _plan: Plan
    _each: Ints
    _wanted: Ints
    _drawing: Drawing | None
    _scored: Tensor | None
    _moving: Moving | None
    _outcomes: Tensor | None = None
    _error: Exception | None = None

    def __post_init__(self) -> None:
        plan = self._plan
        if not any(ask.grammar is not None and plan.fed[row] for row, ask in plan.asks.items()):
            self._draw()

    def _draw(self) -> None:
        drawing, self._drawing = self._drawing, None
        if drawing is not None and self._each.size:
            lines = drawing()
            self._outcomes = self._device.fetch(lines)
        if self._scored is not None:
            self._scored = self._device.fetch(self._scored)
        self._done = self._device.current().record()

    def draw(self) -> None:
        """Draw, if the step waits for that. What it raises is raised by `tokens`."""
        if self._drawing is None:
            return
        try:
            with device_watched(self._device), self._device.active(), torch.inference_mode():
                self._draw()
        except Exception as error:
            self._error = error

    def tokens(self) -> Outcomes:
        """Wait for the step's copies and rows. Returns the outcomes of its rows; none where it has none."""
        self.draw()
        if self._error is not None:
            raise self._error
        with device_watched(self._device):
            self._done.wait()
        lines = NO_LINES if self._outcomes is None else self._outcomes.numpy()
        found = self._sampler.outcomes(self._plan, self._each, self._wanted, lines)
        if self._scored is None:
            return found
        return with_prompt_scores(self._plan, found, self._scored.numpy())

    def moved(self, *, wait: bool = False) -> bool:
        """Whether its saves and loads are done, and the saved slots hashed; with ``wait``, wait for that."""
        if self._moving is None:
            return True
        with device_watched(self._device):
            return self._moving.done(wait=wait)
