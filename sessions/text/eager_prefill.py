"""Prefills what is being said before it has been said: the settled beginning of text that still comes, be it a
user's or a tool's.

What it hands to the engine is a guess that costs nothing later: the turn brings the sequence to its own
tokens, whatever is there. While a reply runs it waits. Knows nothing of frames.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace

from ...runtime.errors import EngineGone, VerbRefused
from ..errors import PromptTooLong, TemplateFailed
from ..items import FunctionCallOutput, Growing
from ..token_ids import Ids, common_prefix
from ..tree import Script
from ..turn.branch import Branch

BURST_SECONDS = 0.005
"""What comes in one go, its commit with it, is mostly a turn's in its own step."""

OUTPUT_SECONDS = 0.01
"""After a tool's output the turn is mostly asked for at once, and computes what is left in its own step."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens of a committed text and of what the template puts around it.

    ``prefilled``: handed to the engine before the commit. ``left``: the others, the reply's opening included;
    at least so many where the text is too long for the model's context.
    """

    prefilled: int
    left: int


class EagerPrefill:
    """One session's. ``expect`` may be called as often as text comes: the latest counts."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch
        self._wanted: Growing | None = None
        self._done: Growing | None = None
        self._task: asyncio.Task[None] | None = None
        self._rest: asyncio.Task[None] | None = None
        self._came = 0.0  # when the first of what is not prefilled did, by the event loop's clock
        self._last = 0.0  # when some was prefilled

    def expect(self, item: Growing | None) -> None:
        """This much of the next item has come; None: it was taken back, or is one now."""
        if self._wanted is None or self._wanted is self._done:
            self._came = _now()
        self._wanted = item
        self.resume()

    def resume(self) -> None:
        """Go on, if there is something to do; called when a reply has ended too."""
        if self._due and self._task is None:
            self._task = asyncio.create_task(self._follow(), name="holdfast-anticipation")

    async def arrival(self) -> Arrival:
        """What was prefilled of the history's end as it stands now. Raises ``TemplateFailed``.

        The rest is prefilled from now on: text that was committed will be answered.
        """
        script = self._branch.history.script()
        try:
            draft = await self._branch.draft(script, self._branch.link.hello.max_context)
        except PromptTooLong as fault:
            return Arrival(0, fault.tokens - (0 if script.base is None else script.base.length))
        whole = draft.tokens()
        held = max(0, common_prefix(self._branch.sequence.sent, whole) - draft.keep)
        if held and self._fits(whole) and (self._rest is None or self._rest.done()):
            wait = OUTPUT_SECONDS if isinstance(script.segments[-1], FunctionCallOutput) else 0.0
            self._rest = asyncio.create_task(self._complete(whole, wait), name="holdfast-anticipation-rest")
        return Arrival(held, len(whole) - draft.keep - held)

    async def aclose(self) -> None:
        """Stop; what the engine was given stays with its sequence."""
        self._wanted = None
        tasks = [task for task in (self._task, self._rest) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _due(self) -> bool:
        return self._wanted is not self._done and self._wanted is not None and not self._branch.history.busy

    async def _follow(self) -> None:
        try:
            while self._due:
                await self._pause()
                wanted = self._wanted
                if self._due and wanted is not None:
                    self._last = _now()
                    with suppress(VerbRefused, EngineGone, TemplateFailed):
                        await self._prefill(wanted)
                    self._done = wanted
        finally:
            self._task = None

    async def _pause(self) -> None:
        """Until what has come is to be prefilled. The more parts wait already for a step to end, as they do
        where steps are long, the later comes the next one; or else when that step is over.
        """
        sequence, apart = self._branch.sequence, self._branch.settings.debounce_seconds
        begin = max(self._came + BURST_SECONDS, self._last + apart)
        await asyncio.sleep(max(0.0, begin - _now()))
        if sequence.pending_extends:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._last + apart * (1 + sequence.pending_extends)):
                    await sequence.wait_extended()

    async def _prefill(self, item: Growing) -> None:
        history = self._branch.history
        script = history.script()
        if self._branch.least(item) >= self._branch.link.hello.max_context:
            return
        grown = (*script.segments, item)
        ids = await self._settled(replace(script, segments=grown))
        if len(ids) and self._fits(ids):
            await self._branch.sequence.prefill(ids, unless=lambda: history.busy)

    def _fits(self, ids: Ids) -> bool:
        """Whether a turn can be made of them. More than that an engine refuses, and what it held, and the
        lease of it, would be let go."""
        return len(ids) < self._branch.link.hello.max_context

    async def _complete(self, ids: Ids, wait: float) -> None:
        history = self._branch.history
        await asyncio.sleep(wait)
        with suppress(VerbRefused, EngineGone):
            await self._branch.sequence.prefill(
                ids, unless=lambda: history.busy or self._wanted is not None, turn_expected=True
            )

    async def _settled(self, script: Script) -> Ids:
        renderer = self._branch.renderer
        if script.characters() < self._branch.settings.aside_characters:
            return renderer.settled(script)
        return await self._branch.slot.run(lambda gone: renderer.settled(script))


def _now() -> float:
    return asyncio.get_running_loop().time()
