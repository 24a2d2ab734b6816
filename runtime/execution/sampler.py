"""From the logits of a step's rows to sampled tokens: packs what each row asks for and calls the kernels.

The tokens before a row's last one come from the batch, so a row samples the same after a preemption or a
restart. Only each row's last token is taken from the device, where a step in flight may have left it. Rows that
ask for nothing cost an argmax. Knows no sequences.

The seeded draw itself is a kernel: `seeded_sampling.py` in `kernels/reference/` and in `kernels/gpu/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor

from ...kernels.device import Device, Ints
from ...kernels.interface import Kernels
from ...kernels.reference import penalties
from ...kernels.reference.penalties import NO_TOKEN, NOTHING
from ...kernels.reference.seeded_sampling import Typical
from ..errors import GrammarInvalid, GrammarStuck
from ..grammar.llguidance import Matchers
from ..plan import NO_TOKEN as NONE_DRAWN
from ..plan import NOTHING_MORE, Outcomes, Plan, RowAsks, RowFault, Scored
from ..verbs import Sampling, TokenLogprob
from .batch import Batch

_SOUND, _INFINITE, _FORBIDDEN = 1, 0, 2
_FAULTS = {_INFINITE: "logits are not finite", _FORBIDDEN: "every token is forbidden"}

SCORED_AT_ONCE = 128
"""Rows of logits that are made at once for log probabilities of prompts."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRows:
    """The sampling parameters of a step's rows that draw, on the device, in their order. ``slots``: int64
    ``[rows]``. ``warm``: the rows with a temperature, int64; None: all. ``parameters`` (temperature, top-k,
    top-p and seed, as `Kernels.sample` takes them), ``min_p`` and ``typical`` are of these rows; ``typical`` is
    None where no row has it. ``scored``: the rows that want log probabilities, int64, None for none; ``most``:
    how many alternatives."""

    of: Ints
    version: int
    slots: Tensor
    warm: Tensor | None
    parameters: tuple[Tensor, Tensor, Tensor, Tensor]
    min_p: Tensor
    typical: Typical | None
    scored: Tensor | None
    most: int


class Sampler:
    """Draws for rows of plans. ``batch``: has the sampling parameters of their slots; ``grammars``: makes the
    masks; ``device``: the one of the logits; ``kernels``: the backend that computes."""

    def __init__(self, batch: Batch, grammars: Matchers, device: Device, kernels: Kernels) -> None:
        self._batch = batch
        self._grammars = grammars
        self._device = device
        self._kernels = kernels
        self._last: DrawnRows | None = None

    def rows(self, slots: Ints) -> DrawnRows:
        """The rows in these slots: while the same ones draw, their parameters need not go up again."""
        last = self._last
        if last is None or last.version != self._batch.version or not np.array_equal(last.of, slots):
            self._last = last = _uploaded(slots, self._batch, self._device)
        return last

    def draw(
        self, plan: Plan, chosen: DrawnRows, rows: Ints, positions: Tensor, logits: Tensor, last: Tensor
    ) -> Tensor:
        """Sample one token for each of the ``rows`` of ``plan`` that draw, int64 ``[drawn]``; ``chosen``: their
        sampling parameters. Returns a line for each, to be read by `outcomes`: int64 ``[drawn, 2 + scores]``.
        May overwrite ``logits``.

        ``positions``: of the tokens that are drawn, int64 ``[drawn]``. ``logits``: fp32 ``[drawn, vocab]``.
        ``last``: the rows' last tokens, int64 ``[drawn]``. Columns: the token id; a code for "sound" or for
        what is wrong; and, if a row asks for log probabilities, the id's own, the ids of the n likeliest tokens
        and their log probabilities (fp64 numbers as the int64 with the same bits).
        """
        batch, kernels, slots = self._batch, self._kernels, plan.slots[rows]
        verdict = sound(logits)
        scored = chosen.scored
        model = logits[scored] if scored is not None else None
        samplings = ((at, batch.samplings[slots[at]]) for at in np.flatnonzero(batch.edits[slots]).tolist())
        edited = [(at, sampling) for at, sampling in samplings if sampling is not None]
        edits = [
            *_bias(plan, rows, edited),
            *_penalties(plan, batch, rows, slots, kernels),
            *_bad_words(plan, batch, rows, slots, edited),
            *_grammars(plan, rows, logits.shape[-1], self._grammars, kernels),
        ]
        if edits:
            tensors = iter(self._device.upload([array for arrays, _ in edits for array in arrays]))
            for arrays, act in edits:
                act([next(tensors) for _ in arrays], logits, last)
            left = logits.amax(-1) > float("-inf")
            verdict = torch.where(left, verdict, torch.where(verdict == _SOUND, _FORBIDDEN, verdict))
        ids = _choose(chosen, positions, logits, kernels)
        drawn = torch.stack((ids, verdict), dim=-1)
        if scored is None or model is None:
            return drawn
        scores = _scores(model, ids[scored], chosen.most, kernels)
        padded = torch.zeros((len(rows), scores.shape[1]), dtype=torch.int64, device=logits.device)
        return torch.cat((drawn, padded.index_copy_(0, scored, scores)), dim=-1)

    def score(self, plan: Plan, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor | None:
        """The log probabilities of all rows' ``scored`` tokens, in order, to be read by `with_prompt_scores`:
        int64 ``[tokens, 1 + 2 most]``; None if no row has any.

        ``hidden``: of the step, ``[step's tokens, hidden]``. ``head``: makes logits of hidden states. It gets
        `SCORED_AT_ONCE` at a time, since a whole prompt's logits may not fit the device.
        """
        asked = [(row, ask, ask.scored) for row, ask in sorted(plan.asks.items()) if ask.scored is not None]
        if not asked:
            return None
        starts = np.cumsum(plan.counts) - plan.counts - plan.firsts
        at = [starts[row] + ask.scored_from + np.arange(len(tokens)) for row, ask, tokens in asked]
        rows, ids = self._device.upload([np.concatenate(at), np.concatenate([ids for *_, ids in asked])])
        most = max(ask.scored_top for _, ask, _ in asked)
        parts = zip(torch.split(rows, SCORED_AT_ONCE), torch.split(ids, SCORED_AT_ONCE), strict=True)
        return torch.cat([_scores(head(hidden[some]), them, most, self._kernels) for some, them in parts])

    def outcomes(self, plan: Plan, each: Ints, wanted: Ints, lines: Ints) -> Outcomes:
        """The outcomes of the rows of ``plan``, from the lines of `draw`, int64 ``[draws, 2 + scores]``.
        ``each``: the number of each line's row, ascending. ``wanted``: of each row, how many alternatives to
        report, -1 for no log probabilities."""
        if plan.draws_one_each:
            ids = lines[:, :1]
        else:
            column = np.arange(len(each)) - np.searchsorted(each, each)
            ids = np.full((len(plan), int(column.max(initial=-1)) + 1), NONE_DRAWN, dtype=np.int64)
            ids[each, column] = lines[:, 0]
        others: dict[int, Scored | RowFault] = {}
        special = (lines[:, 1] != _SOUND) | (wanted[each] >= 0)
        for number in np.flatnonzero(special).tolist() if special.any() else ():
            at, (token, verdict) = int(each[number]), lines[number, :2].tolist()
            if verdict == _SOUND:
                others[at] = Scored([token], [_logprob(lines[number, 2:], wanted[at])])
            else:
                others[at] = self._fault(int(plan.seqs[at]), plan.asks.get(at, NOTHING_MORE), verdict)
        return Outcomes(ids, others)

    def _fault(self, seq: int, ask: RowAsks, verdict: int) -> RowFault:
        if ask.grammar is None or verdict != _FORBIDDEN:
            return RowFault(f"sequence {seq}: {_FAULTS[verdict]}")
        fault = self._grammars.fault(ask.grammar)
        if fault:
            return RowFault(f"grammar: {fault}", GrammarInvalid.code)
        return RowFault("every token that the grammar allows is forbidden otherwise", GrammarStuck.code)


def _uploaded(slots: Ints, batch: Batch, device: Device) -> DrawnRows:
    warm = batch.temperature[slots] > 0
    scored = np.flatnonzero(batch.scores[slots] >= 0)
    hot = slots[warm]
    typical = np.flatnonzero(batch.typical_p[hot] < 1)
    whole = [slots, np.flatnonzero(warm), scored, batch.top_k[hot], batch.seed[hot], typical]
    # One array for each argument, none a row of a larger one: so that each is aligned (see `upload`).
    reals = (batch.temperature[hot], batch.top_p[hot], batch.min_p[hot], batch.typical_p[hot[typical]])
    of, at, with_scores, k, seeds, rows, *bits = device.upload([*whole, *map(_bits, reals)])
    temperature, mass_p, least_p, mass = (one.view(torch.float64) for one in bits)
    return DrawnRows(
        slots,
        batch.version,
        of,
        None if warm.all() else at,
        (temperature, k, mass_p, seeds),
        least_p,
        Typical(rows, mass) if typical.size else None,
        with_scores if scored.size else None,
        int(batch.scores[slots].max(initial=0)),
    )


def sound(logits: Tensor) -> Tensor:
    """For each row of logits 1 if all are finite, else 0: int64 ``[rows]``."""
    # The sum of finite fp32 logits is finite, and of any others it is not: one pass, no mask.
    return logits.sum(-1).isfinite().long()


def with_prompt_scores(plan: Plan, found: Outcomes, lines: Ints) -> Outcomes:
    """The outcomes with the log probabilities of each row's ``scored`` tokens. ``lines``: of `score`."""
    others, at = dict(found.others), 0
    for number, ask in sorted(plan.asks.items()):
        if ask.scored is None:
            continue
        end = at + len(ask.scored)
        scores = [_logprob(line, ask.scored_top) for line in lines[at:end]]
        one = found[number]
        if isinstance(one, Scored):
            others[number] = Scored(one.tokens, one.logprobs, scores)
        elif not isinstance(one, RowFault):
            others[number] = Scored(one, [], scores)
        at = end
    return Outcomes(found.ids, others)


def _logprob(line: Ints, wanted: int) -> TokenLogprob:
    """What a line of `_scores` says, with so many of its likeliest tokens."""
    most, values = len(line) // 2, line.view(np.float64)
    top = zip(line[1 : most + 1].tolist(), values[most + 1 :].tolist(), strict=True)
    return TokenLogprob(float(values[0]), list(top)[:wanted])


def _scores(model: Tensor, ids: Tensor, most: int, kernels: Kernels) -> Tensor:
    """For the rows of ``model`` (logits before any edit): the log probability of each row's sampled id
    (``ids``), the ids of the ``most`` likeliest tokens (of all, if there are fewer), and their log
    probabilities: int64 ``[rows, 1 + 2 most]``, log probabilities as the bits of fp64."""
    chosen, names, values = kernels.log_probabilities(model, ids, min(most, model.shape[-1]))
    return torch.cat((chosen.view(torch.int64)[:, None], names, values.view(torch.int64)), dim=-1)


# --- before temperature: bias, penalties, forbidden tokens -----------------------------------------------


_Act = Callable[[list[Tensor], Tensor, Tensor], None]
_Edited = list[tuple[int, Sampling]]
"""Rows with a bias or bad words: their numbers among those that draw, and their sampling."""
_Edit = tuple[list[Ints], _Act]
"""One kind of edit of the logits, in place: arrays to upload, and what is done with them on the device: a
function of (uploaded arrays, logits, the rows' last tokens). The functions below make one, or none if no row
asks for it."""


def _bias(plan: Plan, rows: Ints, edited: _Edited) -> list[_Edit]:
    cells = [(at, token, bias) for at, sampling in edited for token, bias in sampling.logit_bias]
    for row, forbidden in [(row, ask.forbidden) for row, ask in plan.asks.items() if ask.forbidden]:
        cells += [(at, token, -inf) for at in np.flatnonzero(rows == row).tolist() for token in forbidden]
    if not cells:
        return []
    numbers, tokens, values = zip(*cells, strict=True)

    def act(up: list[Tensor], logits: Tensor, last: Tensor) -> None:
        penalties.add(logits, up[0], up[1], up[2].view(torch.float64))

    return [([_ints(numbers), _ints(tokens), _bits(values)], act)]


def _penalties(plan: Plan, batch: Batch, rows: Ints, slots: Ints, kernels: Kernels) -> list[_Edit]:
    at = np.flatnonzero(batch.penalizes[slots])
    if not at.size:
        return []
    some, ends = slots[at], (plan.firsts + plan.counts)[rows[at]]
    if plan.drafts:
        behind = np.searchsorted(rows, rows, side="right") - 1 - np.arange(len(rows))
        ends = ends - behind[at]
    counted = batch.tally.plan(some, ends, batch.output_from[some], batch.past)
    strengths = (batch.repetition, batch.frequency, batch.presence)

    def act(up: list[Tensor], logits: Tensor, last: Tensor) -> None:
        rows, *bits = up[:4]
        cells = batch.tally.count(up[4:], last[rows], logits.shape[-1], kernels)
        kernels.penalize(logits, rows, cells, up[4], *(one.view(torch.float64) for one in bits))

    return [([at, *(_bits(one[some]) for one in strengths), *counted], act)]


def _bad_words(plan: Plan, batch: Batch, rows: Ints, slots: Ints, edited: _Edited) -> list[_Edit]:
    words = [(at, sampling, word) for at, sampling in edited for word in sampling.bad_words]
    if not words:
        return []
    width = max(len(word) for *_, word in words)
    beginnings = np.full((len(words), width), NO_TOKEN, dtype=np.int64)
    for number, (*_, word) in enumerate(words):
        beginnings[number, width - len(word) + 1 :] = word[:-1]
    # [words, width]: the last tokens of each word's row; the last column is filled in on the device.
    ends = np.full((len(words), width), NOTHING, dtype=np.int64)
    before = (plan.firsts + plan.counts)[rows] - 1
    for number, (at, sampling, _) in enumerate(words):
        if sampling.reads_past and width > 1:
            past = batch.past(int(slots[at]), int(before[at]))[-(width - 1) :]
            ends[number, width - 1 - len(past) : width - 1] = past

    def act(up: list[Tensor], logits: Tensor, last: Tensor) -> None:
        rows, finals, begun, said = up
        said[:, -1] = last[rows]
        penalties.forbid(logits, rows, finals, penalties.completes(begun, said))

    numbers, finals = _ints([at for at, *_ in words]), _ints([word[-1] for *_, word in words])
    return [([numbers, finals, beginnings, ends], act)]


def _grammars(plan: Plan, rows: Ints, vocab: int, owner: Matchers, kernels: Kernels) -> list[_Edit]:
    bound = {row: ask.grammar for row, ask in plan.asks.items() if ask.grammar is not None}
    if not bound:
        return []
    some = [(at, bound[row]) for at, row in enumerate(rows.tolist()) if row in bound]
    masks = np.zeros((len(some), -(-vocab // 64)), dtype=np.int64)
    for mask, (_, grammar) in zip(masks, some, strict=True):
        owner.fill(grammar, mask)

    def act(up: list[Tensor], logits: Tensor, last: Tensor) -> None:
        kernels.allow(logits, *up)

    return [([_ints([at for at, _ in some]), masks], act)]


# --- temperature, limits, sampling ------------------------------------------------------------------------


def _choose(chosen: DrawnRows, positions: Tensor, logits: Tensor, kernels: Kernels) -> Tensor:
    """The next token of each row, int64 ``[rows]``. Rows with temperature 0 take the argmax, others a sample.

    ``positions``: of each row, in the order of ``logits`` ``[rows, vocab]``.
    """
    if not len(chosen.min_p):
        return logits.argmax(-1)
    warm = slice(None) if chosen.warm is None else chosen.warm
    parameters, at = chosen.parameters, positions[warm]
    drawn = kernels.sample(logits[warm], *parameters, at, min_p=chosen.min_p, typical=chosen.typical)
    return drawn if chosen.warm is None else logits.argmax(-1).index_copy_(0, chosen.warm, drawn)


def _ints(values: object) -> Ints:
    return np.array(values, dtype=np.int64)


def _bits(values: object) -> Ints:
    """Float64 numbers as integers of the same bits, to be uploaded with the others."""
    return np.array(values, dtype=np.float64).view(np.int64)
