"""Prefills streamed input, a user's message or a tool's output, while its text comes: the tokens that later
text cannot change.

The prefilled tokens are a guess. The turn brings the engine's sequence to its own tokens in any case, so a
wrong guess costs nothing but the work. While a reply runs, nothing is prefilled.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace

from ...runtime.errors import EngineGone, VerbRefused
from ..conversation.items import FunctionCallOutput, Growing
from ..conversation.tree import Script
from ..errors import PromptTooLong, TemplateFailed
from ..token_ids import Ids, common_prefix
from ..turn.branch import Branch
from .renderer import text_of

BURST_SECONDS = 0.005
"""The first text waits this long to be prefilled, because its commit often comes with it; then the turn
computes all."""

OUTPUT_SECONDS = 0.01
"""The rest of a committed tool's output waits this long to be prefilled, because the turn often begins at once
and computes it."""


@dataclass(frozen=True, slots=True)
class PrefilledInput:
    """The tokens of a text that is committed, and of what the template writes around it.

    ``prefilled``: those sent to the engine before the commit. ``left``: the others, with the reply's opening; a
    lower bound if the text is too long for the model's context, or a reply runs.
    """

    prefilled: int = 0
    left: int = 0


class EagerPrefill:
    """Prefills the streamed input of one session in a task of its own, with pauses between the prefills."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch
        self._wanted: Growing | None = None
        self._done: Growing | None = None
        self._task: asyncio.Task[None] | None = None
        self._rest: asyncio.Task[None] | None = None
        self._came = 0.0  # when the first text came that is not prefilled, in the event loop's seconds
        self._last = 0.0  # when the last prefill began

    def expect(self, item: Growing | None) -> None:
        """Prefill ``item``, the next item with its text so far. None: it was taken back or committed.

        A later call replaces an earlier one.
        """
        if self._wanted is None or self._wanted is self._done:
            self._came = _now()
        self._wanted = item
        self.resume()

    def resume(self) -> None:
        """Go on if there is text to prefill. Call it when a reply has ended."""
        if self._due and self._task is None:
            self._task = asyncio.create_task(self._follow(), name="holdfast-eager-prefill")

    async def prefilled_input(self, item: Growing) -> PrefilledInput:
        """How many tokens of the items behind the last reply were prefilled, and how many are left, with
        ``item``, the streamed text that is committed next. Begins to prefill the rest, because committed text
        will be answered. Raises ``TemplateFailed``."""
        history, tokenizer = self._branch.history, self._branch.language.tokenizer
        if history.busy:  # the text comes after a reply that is not known yet
            return PrefilledInput(0, tokenizer.least(text_of(item)))
        script = self._grown(item)
        try:
            draft = await self._branch.draft(script, self._branch.link.hello.max_context)
        except PromptTooLong as fault:
            return PrefilledInput(0, fault.tokens - (0 if script.base is None else script.base.length))
        whole = draft.tokens()
        held = max(0, common_prefix(self._branch.sequence.sent, whole) - draft.keep)
        if held and self._fits(whole) and (self._rest is None or self._rest.done()):
            wait = OUTPUT_SECONDS if isinstance(script.segments[-1], FunctionCallOutput) else 0.0
            self._rest = asyncio.create_task(self._complete(whole, wait), name="holdfast-eager-prefill-rest")
        return PrefilledInput(held, len(whole) - draft.keep - held)

    async def aclose(self) -> None:
        """Stop prefilling. What the engine's sequence has been given stays there."""
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
        """Wait until the next prefill is due.

        If the engine has not answered earlier ones, because its steps are long, wait until it has; at most
        ``debounce_seconds`` more for each of them.
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
        if self._branch.language.tokenizer.least(text_of(item)) >= self._branch.link.hello.max_context:
            return
        grown = self._grown(item)
        ids = await self._branch.render(grown, lambda _: self._branch.renderer.stable_tokens(grown))
        if len(ids) and self._fits(ids):
            await self._branch.sequence.prefill(ids, unless=lambda: history.busy)

    def _grown(self, item: Growing) -> Script:
        """The prompt of a turn that begins now, with ``item`` as its last item."""
        script = self._branch.history.script()
        return replace(script, segments=(*script.segments, item))

    def _fits(self, ids: Ids) -> bool:
        """Whether ``ids`` leave room for at least one more token in the model's context. The engine would
        refuse them otherwise, and the sequence would be closed, with its lease."""
        return len(ids) < self._branch.link.hello.max_context

    async def _complete(self, ids: Ids, wait: float) -> None:
        history = self._branch.history
        await asyncio.sleep(wait)
        with suppress(VerbRefused, EngineGone):
            await self._branch.sequence.prefill(
                ids, unless=lambda: history.busy or self._wanted is not None, turn_expected=True
            )


def _now() -> float:
    return asyncio.get_running_loop().time()
