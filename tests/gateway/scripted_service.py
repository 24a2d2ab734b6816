"""A scripted engine as a service asks it, and words for it to say."""

from __future__ import annotations

from holdfast.runtime.link.messages import Phase
from holdfast.tests.sessions.scripted_link import ScriptedLink
from holdfast.tests.sessions.text.chat_languages import end_id, ids

END = end_id("chatml")
WORDS = ids("chatml", " one two three four five six seven eight nine ten")


def spoken(tokens: list[int]) -> int:
    """Some words, by what stands before them; then the end."""
    value = hash((len(tokens), *tokens[-12:])) % 31
    return END if value < 2 else WORDS[value % len(WORDS)]


class Scripted(ScriptedLink):
    """With what a service asks besides."""

    overdue, ready, phase, heartbeat = 0.0, True, Phase.STEPPING, None

    async def statistics(self) -> dict[str, float]:
        """The numbers that the gateway tells under other names."""
        return {"running": 0.0, "waiting": 0.0, "running_blocks": 0.0, "pool_blocks": 100.0, "preempted": 0.0}

    def on_recovery(self, told: object) -> None:
        """Nothing dies here."""
