"""The session: one conversation with its model, kept across turns, cancels and engine restarts.

Gives out responses and owns the engine's sequence of the main branch. Knows nothing of sockets or frames.
"""

from __future__ import annotations

from datetime import datetime

from ..runtime.link.client import EngineLink
from .anticipation import Anticipation, Arrival
from .errors import SessionClosed
from .history import History
from .items import Message
from .language import Language
from .requests import TurnRequest
from .response import Branch, Response
from .sequence import LiveSequence
from .settings import SessionSettings


class Session:
    """One conversation. ``salt`` separates tenants' cached blocks; ``now`` is the template's today."""

    def __init__(
        self,
        id: str,  # noqa: A002 - the field's own word
        link: EngineLink,
        language: Language,
        *,
        history: History | None = None,
        salt: bytes = b"",
        now: datetime | None = None,
        settings: SessionSettings | None = None,
    ) -> None:
        settings = settings or SessionSettings()
        self.id = id
        self.history = history or History(max_items=settings.max_items)
        self._sequence = LiveSequence(link, salt)
        renderer = language.renderer(now or datetime.now().astimezone())
        self._branch = Branch(self.history, renderer, language, link, self._sequence, settings)
        self._anticipation = Anticipation(self._branch)
        self._responses: list[Response] = []
        self._closed = False

    def respond(self, request: TurnRequest) -> Response:
        """Begin a turn: what it puts before the model is settled now, its events are read from the
        response.

        Raises ``ConversationBusy`` while another one writes the conversation; out-of-band ones may run
        beside it.
        """
        if self._closed:
            raise SessionClosed(f"Session {self.id} was closed")
        response = Response(self._branch, request, self._anticipation.resume)
        self._responses = [*self._live(), response]
        return response

    async def cancel(self) -> bool:
        """Cancel the response that writes the conversation; False if there is none."""
        writers = [response for response in self._live() if response.writes]
        for response in writers:
            await response.cancel()
        return bool(writers)

    def expect(self, message: Message | None) -> None:
        """This much of the next message has come: its settled beginning is prefilled. None: taken back."""
        if not self._closed:
            self._anticipation.expect(message)

    async def arrival(self) -> Arrival:
        """How much of the history's end the engine was given already. Raises ``TemplateFailed``."""
        return await self._anticipation.arrival()

    def statistics(self) -> dict[str, float]:
        """Items, tokens on the branch, and responses that run."""
        head = self.history.tree.head
        return {
            "items": len(self.history),
            "tokens": 0 if head is None else head.length,
            "responses": len(self._live()),
        }

    async def aclose(self) -> None:
        """Cancel what runs and let the engine's sequence go; its KV stays cached until evicted."""
        self._closed = True
        await self._anticipation.aclose()
        for response in self._live():
            await response.cancel()
        await self._sequence.close()

    def _live(self) -> list[Response]:
        return [response for response in self._responses if not response.over]
