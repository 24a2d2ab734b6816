"""The branch of a session that a turn extends: its history, what writes its text, and the engine's copy of
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ...runtime.link.client import EngineLink
from ..conversation.history import History
from ..conversation.tree import Draft, Script
from ..engine_copy import EngineCopy
from ..journal.session_log import SessionLog
from ..settings import SessionSettings
from ..text.language import Language
from ..text.renderer import Renderer
from ..workers import Stopped, WorkerSlot

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Branch:
    """All that the turns and the eager prefill of one session share. ``log``: the session's log in the journal.
    ``renderer``: makes tokens of prompts. ``language``: the model's tokenizer, template and forms of calls.
    ``link``: to the engine. ``sequence``: the engine's copy of the history. ``slot``: the tenant's slot at the
    worker threads."""

    history: History
    log: SessionLog
    renderer: Renderer
    language: Language
    link: EngineLink
    sequence: EngineCopy
    settings: SessionSettings
    slot: WorkerSlot

    async def draft(self, script: Script, most: int | None = None, stopped: Stopped = bool) -> Draft:
        """Render and tokenize the prompt ``script``, on a worker thread if it is long. ``most``: the length of
        the context in tokens; None: any. ``stopped``: once it returns true, tokenizing ends early and the
        result is incomplete. Raises ``TemplateFailed``, and ``PromptTooLong`` beyond ``most``."""
        return await self.render(
            script, lambda gone: self.renderer.draft(script, most, lambda: gone() or stopped())
        )

    async def render(self, script: Script, work: Callable[[Stopped], _T]) -> _T:
        """Call ``work``, which renders the prompt ``script``, and return its result: on a worker thread if the
        prompt is long, else on the event loop. ``work`` gets a function that returns true once the caller was
        cancelled."""
        if script.characters() < self.settings.aside_characters:
            return work(bool)
        return await self.slot.run(work)
