"""The branch of a session that a turn extends: its history, how its text is written, the
engine's copy of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ...runtime.link.client import EngineLink
from ..engine_copy import EngineCopy
from ..history import History
from ..journal.records import SessionLog
from ..settings import SessionSettings
from ..text.language import Language
from ..text.renderer import Renderer
from ..tree import Draft, Script
from ..workers import Stopped, WorkerSlot

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Branch:
    """All that the turns and the eager prefill of one session share. ``sequence``: the engine's copy. ``log``:
    of the session in the journal."""

    history: History
    log: SessionLog
    renderer: Renderer
    language: Language
    link: EngineLink
    sequence: EngineCopy
    settings: SessionSettings
    slot: WorkerSlot

    async def draft(self, script: Script, most: int | None = None, stopped: Stopped = bool) -> Draft:
        """The script in tokens: `Renderer.draft` with the same arguments, on a worker thread if the script is
        long."""
        return await self.render(
            script, lambda gone: self.renderer.draft(script, most, lambda: gone() or stopped())
        )

    async def render(self, script: Script, work: Callable[[Stopped], _T]) -> _T:
        """Call ``work``, which renders the script, and return its result: on a worker thread if the script is
        long. ``work`` gets a function that is true once the caller was cancelled."""
        if script.characters() < self.settings.aside_characters:
            return work(bool)
        return await self.slot.run(work)
