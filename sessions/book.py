"""The book of sessions: who is open, and how many may be. Knows nothing of tenants' limits or handles yet."""

from __future__ import annotations

from datetime import datetime

from ..runtime.link.client import EngineLink
from .errors import SessionLimit, SessionUnknown
from .items import new_id
from .language import Language
from .session import Session
from .settings import SessionSettings


class SessionBook:
    """All sessions of one engine."""

    def __init__(self, link: EngineLink, language: Language, settings: SessionSettings | None = None) -> None:
        self.language = language
        self.settings = settings or SessionSettings()
        self._link = link
        self._sessions: dict[str, Session] = {}
        self._opened = 0

    def create(self, *, salt: bytes = b"", now: datetime | None = None) -> Session:
        """A new session. Raises ``SessionLimit``."""
        if len(self._sessions) >= self.settings.max_sessions:
            raise SessionLimit(f"{self.settings.max_sessions} sessions are open")
        session = Session(
            new_id("sess"), self._link, self.language, salt=salt, now=now, settings=self.settings
        )
        self._sessions[session.id] = session
        self._opened += 1
        return session

    def get(self, session_id: str) -> Session:
        """The open session with this id. Raises ``SessionUnknown``."""
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionUnknown(f"No session {session_id!r}")
        return session

    async def close(self, session_id: str) -> None:
        """End a session and forget it. Raises ``SessionUnknown``."""
        session = self.get(session_id)
        del self._sessions[session_id]
        await session.aclose()

    def statistics(self) -> dict[str, float]:
        """Sums over the open sessions."""
        totals = {"sessions": float(len(self._sessions)), "sessions_opened": float(self._opened)}
        for session in self._sessions.values():
            for name, value in session.statistics().items():
                totals[f"session_{name}"] = totals.get(f"session_{name}", 0.0) + value
        return totals

    async def aclose(self) -> None:
        """End all sessions."""
        for session_id in list(self._sessions):
            await self.close(session_id)
