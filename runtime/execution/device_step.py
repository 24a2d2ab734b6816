"""A step on a GPU: the batch stays there, a step sends what changed, and what is launched depends on the
numbers of tokens and rows alone. So it is captured once for sizes that are rounded up, and replayed.

All that a captured step reads and leaves lies in memory that is made once: tables, sampling parameters and the
ids drawn last by slot, and the step's inputs. Padding has slot -1: its K and V are not stored, and what is
drawn for it goes to the last line of the ids, which no step reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from ...kernels.batch import PagedBatch
from ...kernels.device import Device, Graph
from ..model.decoder import Decoder
from ..plan import NO_BLOCKS, NO_INTS, Ints, Plan
from ..settings import StepSize
from .batch import Batch, Capacity
from .device import is_lost
from .sampler import sound

log = logging.getLogger(__name__)

ROWS, ADAPTED_ROWS, DRAWS = "rows", "rows with adapters", "draws"
"""The parts of a step that are captured."""

NOTHING = -1
"""In a step's inputs: the slot of padding; the id of a token that the slot drew last."""


class Inputs:
    """What a step sends up, int64: one array on the host, copied to one on the device.

    By row: ``slots``; ``contexts``, how many tokens its last one sees; ``given``, the id of its one token, or
    `NOTHING` for the one that the slot drew last; ``adapters``, the slot of its adapter. By draw: ``ends``, the
    number of the token before it; ``drawn``, the slot that has its sampling parameters; ``kept``, the slot that
    keeps the drawn id; ``drawn_at``, the position of the drawn token. ``cells``, ``blocks``: changed cells of
    the tables, `CHANGED` for each row and KV group: the index in all cells, the block id.

    Behind these, if rows have several tokens: ``starts`` ``[rows + 1]``, the number of each row's first token;
    by token ``positions``, ``lines`` (the row's slot), ``ids`` (as ``given``), ``adapted`` (as ``adapters``).
    """

    CHANGED = 2

    def __init__(self, most: StepSize, groups: int, device: torch.device) -> None:
        rows, tokens = most.rows + most.rows % 2, most.tokens + most.tokens % 2
        sizes = dict.fromkeys(
            ("slots", "contexts", "given", "ends", "drawn", "kept", "drawn_at", "adapters"), rows
        )
        sizes |= dict.fromkeys(("cells", "blocks"), self.CHANGED * groups * rows)
        self._single = sum(sizes.values())
        sizes |= {"starts": rows + 2} | dict.fromkeys(("positions", "lines", "ids", "adapted"), tokens)
        ends = list(accumulate(sizes.values(), initial=0))
        self.most = StepSize(tokens, rows)
        self._host: Ints = np.zeros(ends[-1], dtype=np.int64)
        self._up = torch.zeros(ends[-1], dtype=torch.int64, device=device)
        self._at = dict(zip(sizes, pairwise(ends), strict=True))

    def fill(self, size: int, padding: int, **values: Ints) -> None:
        """Write each of the ``values`` and, up to ``size``, ``padding``."""
        for name, array in values.items():
            first, count = self._at[name][0], len(array)
            self._host[first : first + count] = array
            if count < size:
                self._host[first + count : first + size] = padding

    def of(self, name: str, size: int) -> Tensor:
        """The first ``size`` numbers on the device."""
        first = self._at[name][0]
        return self._up[first : first + size]

    def send(self, device: Device, *, single: bool) -> None:
        """Copy what a step reads to the device."""
        end = self._single if single else len(self._host)
        device.write(self._up[:end], self._host[:end])


class BatchOnDevice:
    """What the device holds by slot: ``tables`` int32 ``[slots + 1, groups, blocks]``; ``ids``, drawn last;
    sampling parameters, int64, those that are fp64 by their bits: each ``[slots + 1]``. The last line is
    padding's."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        """``shape``: slots, groups and blocks."""
        slots, groups, blocks = self.slots, self.groups, self.width = shape
        self.tables = torch.zeros((slots + 1, groups, blocks), dtype=torch.int32, device=device)
        self.ids = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._sampling = torch.zeros((5, slots + 1), dtype=torch.int64, device=device)

    def take(self, slots: Ints, batch: Batch, device: Device) -> None:
        """Take over all that ``batch`` holds in these slots."""
        tables = np.zeros((len(slots), self.groups, self.width), dtype=np.int64)
        tables[..., : batch.tables.shape[2]] = batch.tables[slots]
        parameters = (batch.temperature, batch.top_p, batch.min_p, batch.top_k, batch.seed)
        bits = np.stack([one[slots].view(np.int64) for one in parameters])
        at, cells, numbers = device.upload([slots, tables, bits])
        self.tables.index_copy_(0, at, cells.to(torch.int32))
        self._sampling.index_copy_(1, at, numbers)

    def change(self, cells: Tensor, blocks: Tensor) -> None:
        """Write block ids into cells of the tables, each named by its index in all cells."""
        self.tables.view(-1).index_copy_(0, cells, blocks.to(torch.int32))

    def sampling(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Temperature, top-k, top-p, seed and min-p of these slots, ``[slots]`` each."""
        found = self._sampling.index_select(1, slots)
        reals = found[:3].view(torch.float64)
        return reals[0], found[3], reals[1], found[4], reals[2]


class DeviceStep:
    """Computes steps on ``device`` by ``decoder``, over ``arena``. ``batch``: the runner's, of which the
    device holds a copy. ``capacity``: for steps."""

    def __init__(
        self, decoder: Decoder, arena: Tensor, device: Device, batch: Batch, capacity: Capacity
    ) -> None:
        self._decoder = decoder
        self._arena = arena
        self._device = device
        self._batch = batch
        self._block_tokens = arena.shape[4]
        self._graphs: dict[tuple[str, StepSize], Graph] = {}
        self._to_capture: list[StepSize] = []  # the smallest first
        self._state = BatchOnDevice(batch.tables.shape, decoder.device)
        self._inputs = Inputs(StepSize(0, 0), self._state.groups, decoder.device)
        self.reserve(StepSize(capacity.tokens, capacity.rows))

    # --- memory -----------------------------------------------------------------------------------------------

    def reserve(self, most: StepSize) -> None:
        """Make room for steps of these sizes. Where it has to be made anew, captured steps are forgotten, as
        they read the old one."""
        room, device = self._inputs.most, self._decoder.device
        if most.tokens <= room.tokens and most.rows <= room.rows:
            return
        self._graphs.clear()
        size = StepSize(max(most.tokens, room.tokens), max(most.rows, room.rows))
        self._inputs = Inputs(size, self._state.groups, device)
        rows = self._inputs.most.rows
        self._hidden: Tensor | None = None
        self._last = torch.zeros(rows, dtype=torch.int64, device=device)
        self._lines = torch.zeros((rows, 2), dtype=torch.int64, device=device)
        self._counting = torch.arange(rows + 1, device=device)

    def _fit(self) -> None:
        """Make room for all slots and columns of the batch, as `reserve` does."""
        before, batch = self._state, self._batch
        slots, _, blocks = batch.tables.shape
        if slots > before.slots or blocks > before.width:
            self._graphs.clear()
            state = BatchOnDevice(batch.tables.shape, self._decoder.device)
            state.ids[: before.slots] = before.ids[:-1]
            state.take(np.arange(slots), batch, self._device)
            self._state = state

    # --- a step -----------------------------------------------------------------------------------------------

    def launch(self, plan: Plan, each: Ints, back: Ints) -> Tensor | None:
        """Compute the rows of ``plan``; the batch has its changes. ``each``: of each token that is drawn, the
        number of its row; ``back``: how many of the row's tokens stand behind the one after which it is
        drawn. Returns the hidden states of all tokens, ``[tokens, hidden]``; None if the step was replayed."""
        rows = max(len(plan), len(each))
        # With guesses there may be as many draws as tokens, and yet rows of several tokens.
        real = StepSize(plan.size if plan.size == len(plan) else max(plan.size, rows + 1), rows)
        self.reserve(real)
        self._fit()
        scored = any(ask.scored is not None for ask in plan.asks.values())
        sizes = real if scored else self._sizes_for(real)
        self._fill(plan, each, back, sizes)
        self._inputs.send(self._device, single=sizes.single)
        adapted = plan.adapters is not None
        compute = partial(self._compute, sizes, adapted=adapted)
        return compute() if scored else self._run(ADAPTED_ROWS if adapted else ROWS, sizes, compute)

    def computed(self, draws: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the step that was launched last gave, before it draws: the hidden state behind the token of each
        draw, ``[draws, hidden]``, this token's id, and the position of the one that is drawn."""
        assert self._hidden is not None
        return self._hidden[:draws], self._last[:draws], self._inputs.of("drawn_at", draws)

    def draw(self, rows: int) -> Tensor:
        """Draw for the first ``rows`` draws of the step that was launched last, by the sampling parameters of
        their slots. Returns lines as `Sampler.draw` makes them, int64 ``[rows, 2]``; the next step overwrites
        them."""
        sizes = self._sizes_for(StepSize(rows, rows))
        self._run(DRAWS, sizes, partial(self._draw, sizes.rows))
        return self._lines[:rows]

    def keep(self, drawn: Tensor) -> None:
        """Let the slots keep these ids, int64 ``[draws]``, of the step that was launched last."""
        self._state.ids.index_copy_(0, self._inputs.of("kept", len(drawn)), drawn)

    def _run(self, name: str, sizes: StepSize, work: Callable[[], Tensor | None]) -> Tensor | None:
        """Replay ``work``, which is the part ``name`` of a step of these sizes. If it is not captured yet, do
        it, and capture it if it is to be. Returns what it returned, if it was done."""
        graph = self._graphs.get((name, sizes))
        if graph is not None:
            graph.replay()
            return None
        done = work()
        if sizes in self._to_capture:
            try:
                self._record(name, sizes, work)
            except RuntimeError as error:
                self._go_without(error)
        return done

    def _record(self, name: str, sizes: StepSize, work: Callable[[], Tensor | None]) -> None:
        graph = self._device.capture(work)
        if graph is not None:
            self._graphs[name, sizes] = graph

    def _go_without(self, error: RuntimeError) -> None:
        """Compute steps without graphs from now on, as one could not be captured. Raises ``error`` if it means
        that the device is lost."""
        if is_lost(error):
            raise error
        log.warning("steps are not captured as CUDA graphs: %s", " ".join(str(error).split())[:200])
        self._to_capture = []
        self._graphs.clear()

    def _sizes_for(self, real: StepSize) -> StepSize:
        """The least sizes for a step that are to be captured, or the step's own."""
        for one in self._to_capture:
            if one.single == real.single and one.tokens >= real.tokens and one.rows >= real.rows:
                return one
        return real

    def _fill(self, plan: Plan, each: Ints, back: Ints, sizes: StepSize) -> None:
        """Write the step's inputs, and bring up first what changed, where the inputs have no room for it."""
        inputs, state, changes = self._inputs, self._state, plan.changes
        blocks = NO_BLOCKS if changes is None else changes.blocks
        if changes is not None and changes.whole:
            state.take(
                np.array([slot.number for slot in changes.whole], dtype=np.int64), self._batch, self._device
            )
        group, slot, column = blocks[:, :3].T.astype(np.int64)
        cells = (slot * state.groups + group) * state.width + column
        ids = self._batch.tables[slot, group, column].astype(np.int64)
        changed = inputs.CHANGED * state.groups * sizes.rows
        if len(cells) > changed:
            state.change(*self._device.upload([cells, ids]))
            cells, ids = NO_INTS, NO_INTS
        unread = state.slots  # the last line
        inputs.fill(changed, unread * state.groups * state.width, cells=cells)
        inputs.fill(changed, 0, blocks=ids)
        ends = plan.firsts + plan.counts
        inputs.fill(sizes.rows, NOTHING, slots=plan.slots)
        inputs.fill(sizes.rows, 1, contexts=ends)
        slots = plan.slots if plan.draws_one_each else plan.slots[each]
        adapters = NO_INTS if plan.adapters is None else plan.adapters
        inputs.fill(sizes.rows, NOTHING, adapters=adapters)
        draws = max(sizes.rows, self._sizes_for(StepSize(len(each), len(each))).rows)
        # What follows a guess is not known here: the row behind it is not fed.
        inputs.fill(draws, unread, drawn=slots, kept=NO_INTS if plan.drafts else slots)
        inputs.fill(draws, 0, drawn_at=ends[each] - back)
        if sizes.single:
            given = np.full(len(plan), NOTHING, dtype=np.int64)
            given[~plan.fed] = plan.tokens
            inputs.fill(sizes.rows, 0, given=given, ends=each)
            return
        starts = np.cumsum(plan.counts) - plan.counts
        row = np.repeat(np.arange(len(plan)), plan.counts)
        ids = np.full(len(row), NOTHING, dtype=np.int64)
        ids[~plan.fed[row]] = plan.tokens
        inputs.fill(sizes.rows + 1, len(row), starts=starts)
        inputs.fill(sizes.rows, 0, ends=(starts + plan.counts)[each] - 1 - back)
        inputs.fill(sizes.tokens, 0, positions=np.arange(len(row)) - (starts - plan.firsts)[row], ids=ids)
        adapted = adapters[row] if len(adapters) else NO_INTS
        inputs.fill(sizes.tokens, NOTHING, lines=plan.slots[row], adapted=adapted)

    # --- what is captured -------------------------------------------------------------------------------------

    def _compute(self, sizes: StepSize, *, adapted: bool) -> Tensor:
        """From the inputs to the hidden state behind the token of each draw. Returns those of all tokens.
        ``adapted``: some rows have adapters."""
        of, state, kernels = self._inputs.of, self._state, self._decoder.kernels
        tokens, rows = sizes.tokens, sizes.rows
        changed = Inputs.CHANGED * state.groups * rows
        state.change(of("cells", changed), of("blocks", changed))
        contexts = of("contexts", rows)
        if sizes.single:
            lines, given = of("slots", rows), of("given", rows)
            positions, starts = contexts - 1, self._counting[: rows + 1]
        else:
            lines, given = of("lines", tokens), of("ids", tokens)
            positions, starts = of("positions", tokens), of("starts", rows + 1)
        by_group = [
            kernels.look_up(state.tables[:, group], state.ids, lines, positions, given, self._block_tokens)
            for group in range(state.groups)
        ]
        ids = by_group[0][0]
        held = of("slots", rows).clamp(min=0).to(torch.int32)
        adapters = (of("adapters", rows) if sizes.single else of("adapted", tokens)) if adapted else None
        device = self._device
        layouts = [
            PagedBatch(
                positions, written, starts, contexts, state.tables[:, group], held, (), device, adapters
            )
            for group, (_, written) in enumerate(by_group)
        ]
        whole = self._decoder.hidden(ids, layouts, self._arena)
        if self._hidden is None:
            shape = (self._inputs.most.rows, *whole.shape[1:])
            self._hidden = torch.zeros(shape, dtype=whole.dtype, device=whole.device)
        ends = of("ends", rows)
        torch.index_select(whole, 0, ends, out=self._hidden[:rows])
        torch.index_select(ids, 0, ends, out=self._last[:rows])
        return whole

    def _draw(self, rows: int) -> None:
        """From the hidden states to the tokens drawn, which the slots keep."""
        assert self._hidden is not None
        logits = self._decoder.logits(self._hidden[:rows])
        verdict = sound(logits)
        temperature, top_k, top_p, seeds, min_p = self._state.sampling(self._inputs.of("drawn", rows))
        positions = self._inputs.of("drawn_at", rows)
        ids = self._decoder.kernels.sample(logits, temperature, top_k, top_p, seeds, positions, min_p=min_p)
        torch.stack((ids, verdict), dim=-1, out=self._lines[:rows])
        self.keep(self._lines[:rows, 0])

    def capture(self, sizes: Iterable[StepSize], progress: Callable[[StepSize], None], *, now: bool) -> None:
        """Have steps of these ``sizes`` captured, and no others: now, the largest first, each computed once on
        padding, which changes nothing; else when a step first has use for them. ``progress`` is called before
        each. A device without captures computes them padded.

        Raises ``torch.OutOfMemoryError``; what else prevents a capture is a warning, and steps are computed
        without."""
        self._graphs.clear()
        self._to_capture = sorted(set(sizes))
        for one in self._to_capture:
            self.reserve(one)
        self._fit()
        try:
            for one in reversed(self._to_capture if now else ()):
                progress(one)
                self._fill(Plan(0), NO_INTS, NO_INTS, one)
                self._inputs.send(self._device, single=one.single)
                parts: dict[str, Callable[[], Tensor | None]] = {
                    ROWS: partial(self._compute, one, adapted=False)
                }
                if self._decoder.weights.adapts:
                    parts[ADAPTED_ROWS] = partial(self._compute, one, adapted=True)
                if one.single:
                    parts[DRAWS] = partial(self._draw, one.rows)
                for name, work in parts.items():
                    work()
                    self._record(name, one, work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._go_without(error)

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)
