"""The branch of a session that a turn extends: its history, how its text is written, the
engine's copy of it."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.link.client import EngineLink
from ..engine_copy import EngineCopy
from ..history import History
from ..items import FunctionCallOutput, Growing
from ..settings import SessionSettings
from ..text.language import Language
from ..text.renderer import Renderer
from ..tree import Draft, Script
from ..workers import Stopped, WorkerSlot


@dataclass(frozen=True, slots=True)
class Branch:
    """All that the turns and the eager prefill of one session share. ``sequence``: the engine's copy."""

    history: History
    renderer: Renderer
    language: Language
    link: EngineLink
    sequence: EngineCopy
    settings: SessionSettings
    slot: WorkerSlot

    def least(self, item: Growing) -> int:
        """A lower bound of the item's tokens."""
        text = item.output if isinstance(item, FunctionCallOutput) else item.text
        return self.language.tokenizer.least(text)

    async def draft(self, script: Script, most: int | None = None, stopped: Stopped = bool) -> Draft:
        """The script in tokens, as `Renderer.draft`; a long one is rendered on a worker thread."""
        if script.characters() < self.settings.aside_characters:
            return self.renderer.draft(script, most, stopped)
        return await self.slot.run(
            lambda gone: self.renderer.draft(script, most, lambda: gone() or stopped())
        )
