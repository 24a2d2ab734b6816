"""Fits the prompt of a turn into the model's context. If it is too long, the oldest turns are left out.

A turn here is a group of user messages with the replies, calls and outputs that belong to them. A call is never
left out without its output. Instructions and tools always stay. Turns are left out in three steps:

1. older turns, the oldest first;
2. older turns with a call that still waits for its output;
3. inside the turn that is to be answered: all rounds of calls but the last, then all messages but the last.

A step begins only if the prompt is still too long after the step before. Each step leaves out as little as
makes the prompt as short as `Truncation` asks. The code here only renders and tokenizes; it changes no history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ..conversation.items import FunctionCall, FunctionCallOutput, Item, Message
from ..conversation.tree import Draft, Script, Segment, TurnNode, TurnReply
from ..errors import PromptTooLong
from ..text.renderer import Renderer
from ..token_ids import NONE, Ids
from ..workers import Stopped
from .request import Truncation

Unit: TypeAlias = list[int]
"""Indexes into a script's ``segments``. These segments are left out together or not at all."""


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """The result of trying one prompt: its ``draft`` (the prompt in tokens), or why there is none.

    ``tokens``: the length of the prompt, or a lower bound if there is no draft. ``ids``: the prompt's token
    ids. ``refusal``: the error's message, if the prompt is too long to tokenize. ``indexes``: indexes of the
    script's segments (items and replies) that are left out. ``gone``: how many tokens that saves.
    ``instructions``: the number of tokens before the first item; 0 if nothing is left out.
    """

    tokens: int
    draft: Draft | None = None
    ids: Ids = field(default_factory=lambda: NONE)
    refusal: str | None = None
    indexes: tuple[int, ...] = ()
    gone: int = 0
    instructions: int = 0

    def checked(self, max_context: int) -> Draft:
        """The draft. Raises ``PromptTooLong`` if there is none, or if the context has no room for a token
        behind it."""
        if self.refusal is not None:
            raise PromptTooLong(self.refusal, self.tokens, max_context)
        if self.draft is None or self.tokens >= max_context:
            raise PromptTooLong.of(f"it has {self.tokens} tokens", max_context, self.tokens)
        return self.draft


class PromptFit:
    """Fits the prompt ``script`` into a context of ``max_context`` tokens.

    It reserves room for the reply: ``max_output_tokens``, but at most a quarter of the context. A reply without
    a limit gets a quarter. If ``truncation`` is None, nothing is left out.
    """

    def __init__(
        self,
        renderer: Renderer,
        script: Script,
        max_context: int,
        max_output_tokens: int | None,
        truncation: Truncation | None,
    ) -> None:
        self._renderer = renderer
        self._script = script
        self._max_context = max_context
        quarter = max_context // 4
        self._room = quarter if max_output_tokens is None else min(max_output_tokens, quarter)
        self._truncation = truncation

    def whole(self, stopped: Stopped = bool) -> FittedPrompt:
        """The prompt with nothing left out. When ``stopped()`` becomes true, tokenizing stops and the prompt
        may be incomplete. Raises ``TemplateFailed``."""
        return self._tried(self._script, stopped)

    def is_full(self, whole: FittedPrompt) -> bool:
        """Whether turns have to be left out. ``whole``: the prompt with nothing left out."""
        truncation = self._truncation
        if truncation is None:
            return False
        if whole.tokens > self._max_context - self._room:
            return True
        return truncation.post_instructions is not None and whole.tokens > self._most(self._instructions())

    def shortened(self, whole: FittedPrompt, stopped: Stopped = bool) -> FittedPrompt:
        """The prompt after older turns were left out. ``whole``: the prompt with nothing left out. ``stopped``:
        once it returns true, the result may be incomplete. Raises ``TemplateFailed``, and ``PromptTooLong`` if
        the rest, which must stay, does not fit."""
        assert self._truncation is not None, "it may leave something out"
        instructions = self._instructions()
        most = self._most(instructions)
        wanted = instructions + int(max(0, most - instructions) * self._truncation.retained)
        sizes = _Sizes(self._renderer, self._script, whole.draft, instructions, self._max_context)
        left, indexes = whole, set[int]()
        for step in steps_of(self._script.segments):
            if left.tokens <= most or stopped():
                break
            if step:
                left = self._step_taken(step, indexes, sizes, wanted, stopped)
        if left.refusal is not None or left.tokens >= self._max_context:
            told = f"without all older turns it still has {left.tokens} tokens or more: delete its last item"
            raise PromptTooLong.of(f"{told} or send a shorter one", self._max_context, left.tokens)
        if not indexes:
            return left
        gone = whole.tokens - left.tokens
        return replace(left, indexes=tuple(sorted(indexes)), gone=gone, instructions=instructions)

    def _step_taken(
        self, step: list[Unit], indexes: set[int], sizes: _Sizes, wanted: int, stopped: Stopped
    ) -> FittedPrompt:
        """Leave out units (groups of segments that go together) of one step, the first ones first, until the
        prompt has at most ``wanted`` tokens. Returns the prompt that is left. If even all units are not enough,
        all are left out.

        ``step``: the units of the step. ``indexes``: the indexes of the segments left out so far; those of this
        step are added to it. ``sizes``: the segments' sizes, for a first guess.
        """
        tried: dict[int, FittedPrompt] = {}

        def without(count: int) -> FittedPrompt:
            if count not in tried:
                tried[count] = self._tried(self._script.without(indexes.union(*step[:count])), stopped)
            return tried[count]

        low, high = 0, len(step)  # leaving out `low` units is too few; `high` is enough, or all
        probe, stride = sizes.first_guess(step, indexes, wanted), 1
        while high - low > 1:
            probe = min(max(probe, low + 1), high - 1)
            if without(probe).tokens <= wanted:
                high, probe = probe, probe - stride
            else:
                low, probe = probe, probe + stride
            if not low < probe < high:
                probe = (low + high) // 2
            stride *= 2
        indexes.update(*step[:high])
        return without(high)

    def _most(self, instructions: int) -> int:
        """How many tokens a prompt may have before something is left out. ``instructions``: the tokens before
        its first item."""
        most, truncation = self._max_context - self._room, self._truncation
        if truncation is None or truncation.post_instructions is None:
            return most
        return min(most, instructions + truncation.post_instructions)

    def _instructions(self) -> int:
        """The number of tokens of instructions and tools. Raises ``PromptTooLong`` if they alone fill the
        context."""
        instructions = self._renderer.heading(self._script.preamble, self._max_context)
        if instructions >= self._max_context:
            told = f"instructions and tools have {instructions} tokens or more: shorten them"
            raise PromptTooLong.of(told, self._max_context, instructions)
        return instructions

    def _tried(self, script: Script, stopped: Stopped) -> FittedPrompt:
        try:
            draft = self._renderer.draft(script, self._max_context, stopped)
        except PromptTooLong as fault:
            return FittedPrompt(max(fault.tokens, self._max_context), refusal=fault.message)
        ids = draft.tokens()
        return FittedPrompt(len(ids), draft, ids)


class _Sizes:
    """The number of tokens of each segment, by its index in the script: exact in turns that were tokenized
    before, estimated in others."""

    def __init__(
        self, renderer: Renderer, script: Script, draft: Draft | None, instructions: int, max_context: int
    ) -> None:
        self._renderer, self._segments, self._most = renderer, script.segments, max_context
        self._instructions = instructions
        self._known: dict[int, int] = {}
        turns: dict[int, TurnNode] = {}
        node = script.base if draft is None else draft.parent
        for known in () if node is None else node.ancestry():
            turns[id(known.reply)] = known
        begin = 0
        for index, segment in enumerate(script.segments):
            if (turn := turns.get(id(segment))) is not None:
                before = instructions if turn.parent is None else turn.parent.length
                asked = sum(self[at] for at in range(begin, index))
                self._known[index] = max(0, turn.length - before - asked)
            if isinstance(segment, TurnReply):
                begin = index + 1

    def __getitem__(self, index: int) -> int:
        if index not in self._known:
            self._known[index] = self._renderer.size(self._segments[index], self._most)
        return self._known[index]

    def first_guess(self, step: list[Unit], gone: set[int], wanted: int) -> int:
        """An estimate of how many units of ``step``, from the first one on, must be left out so that the prompt
        has at most ``wanted`` tokens: at least one, none for an empty step.

        ``step``: one of the lists that `steps_of` yields; a unit is a group of segments that go together.
        ``gone``: the segments that were left out before this step. It adds the sizes of the units to those of
        all other segments that stay, from the last unit back, and stops at the first unit that is too much, so
        the sizes of the units before that one are not asked for.
        """
        in_step = {index for unit in step for index in unit}
        kept = (at for at in range(len(self._segments)) if at not in gone and at not in in_step)
        total = self._instructions + sum(self[index] for index in kept)
        for count in range(len(step), 0, -1):
            total += sum(self[index] for index in step[count - 1])
            if total > wanted:
                return count
        return min(1, len(step))


# --- what goes together ------------------------------------------------------------------------------------


def steps_of(segments: Sequence[Segment]) -> Iterator[list[Unit]]:
    """What may be left out of a prompt, in three steps: older turns; older turns with a call that waits for its
    output; and parts of the turn that is to be answered. Yields for each step its units (indexes of segments
    that go together), the first to go first."""
    *older, last = _units(segments, range(len(segments)), _begins_turn) or [[]]
    waiting = [unit for unit in older if _waits(segments, unit)]
    yield [unit for unit in older if unit not in waiting]
    yield waiting
    *inner, final = _units(segments, last, _begins_round) or [[]]
    asked = [unit for unit in inner if _asks(segments[unit[0]])]
    rounds = [unit for unit in inner if unit not in asked]
    answered_last = bool(final) and not _asks(segments[final[-1]])
    yield rounds + (asked[:-1] if answered_last else asked)


def older_turns(segments: Sequence[Segment], keep: int) -> tuple[int, ...]:
    """The indexes, sorted, of the segments (items and replies) in all turns but the last ``keep`` ones, without
    turns that have a call that waits for its output."""
    turns = _units(segments, range(len(segments)), _begins_turn)
    older = turns[: max(0, len(turns) - keep)]
    return tuple(sorted(index for unit in older if not _waits(segments, unit) for index in unit))


def _units(
    segments: Sequence[Segment], indexes: Sequence[int], begins: Callable[[Segment, Segment], bool]
) -> list[Unit]:
    """Group the segments at ``indexes`` into units. ``begins``, given a segment and the one before it, says
    whether a unit begins there.

    Units that hold a call and its output are joined. The units are in the order in which they end.
    """
    units: list[Unit] = []
    made: dict[str, int] = {}  # the index of the unit that holds each call, by call id
    joined: dict[int, int] = {}  # indexes of units that were joined with an earlier unit

    def home(unit: int) -> int:
        while unit in joined:
            unit = joined[unit]
        return unit

    for at, index in enumerate(indexes):
        segment = segments[index]
        if at == 0 or begins(segments[indexes[at - 1]], segment):
            units.append([])
        own = len(units) - 1
        units[own].append(index)
        made.update((call.call_id, own) for call in _calls(segment))
        if isinstance(segment, FunctionCallOutput) and segment.call_id in made:
            caller = home(made[segment.call_id])
            if caller != home(own):
                first, second = sorted((caller, home(own)))
                joined[second] = first
    for unit in range(len(units)):
        if home(unit) != unit:
            units[home(unit)] += units[unit]
    whole = [sorted(units[unit]) for unit in range(len(units)) if unit not in joined]
    return sorted(whole, key=lambda unit: unit[-1])


def _begins_turn(before: Segment, segment: Segment) -> bool:
    return _asks(segment) and not _asks(before)


def _begins_round(before: Segment, segment: Segment) -> bool:
    if _asks(segment) or isinstance(segment, TurnReply):
        return True
    return not isinstance(segment, FunctionCallOutput) and (
        _asks(before) or isinstance(before, FunctionCallOutput)
    )


def _asks(segment: Segment) -> bool:
    """Whether the segment is a message that the model did not write."""
    return isinstance(segment, Message) and segment.role != "assistant"


def _calls(segment: Segment) -> list[FunctionCall]:
    items: tuple[Item, ...] = segment.items if isinstance(segment, TurnReply) else (segment,)
    return [item for item in items if isinstance(item, FunctionCall)]


def _waits(segments: Sequence[Segment], unit: Unit) -> bool:
    """Whether a complete call in the unit has no output in the same unit; outputs in other units do not
    count."""
    answered = {one.call_id for index in unit if isinstance(one := segments[index], FunctionCallOutput)}
    calls = (call for index in unit for call in _calls(segments[index]))
    return any(call.complete and call.call_id not in answered for call in calls)
