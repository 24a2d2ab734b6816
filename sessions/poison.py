"""The poison rule: finds out whether one branch (a conversation, or a response beside it with a sequence of its
own in the engine) makes engines crash.

When an engine dies in a step, each sequence of that step is a suspect, unless the engine was killed from
outside. After ``ISOLATE_AFTER`` such crashes a branch runs isolated: its sequence shares no step until it has
sampled a token. If an engine dies in an isolated step, the branch is poisoned and its turn fails. A sampled
token resets the count.

The count belongs to the branch, because sequence ids are new in every engine. It outlives turns, so trying a
poisoned prompt again costs one engine and not three.
"""

from __future__ import annotations

from ..runtime.link.crash_report import EngineDeath
from .errors import SequencePoisoned

ISOLATE_AFTER = 2
"""After this many crashes a branch runs isolated: its sequence shares no step with others."""

MAX_KILLS = 16
"""A branch fails after so many engines were killed from outside (by the out-of-memory killer, for one)
without a token in between."""


class CrashCount:
    """How often engines died in a step of one branch (a conversation, or a response beside it) since its last
    sampled token; crashes and kills from outside are counted apart."""

    def __init__(self) -> None:
        self._crashes = 0
        self._kills = 0

    @property
    def isolated(self) -> bool:
        """Whether the branch's sequence must share no step with others."""
        return self._crashes >= ISOLATE_AFTER

    def add(self, death: EngineDeath, seq: int, isolated: bool) -> None:
        """Count the death of an engine that held the branch as the sequence with the id ``seq``. ``isolated``:
        whether that sequence was opened to share no step. Does nothing if it was not in the step in which the
        engine died.

        Raises:
            SequencePoisoned: the engine died in an isolated step, or too many engines were killed.
        """
        if seq not in death.step:
            return
        if death.outside:
            self._kills += 1
        elif isolated and len(death.step) == 1:
            raise SequencePoisoned(f"The model's engine dies of this conversation: {death.cause}")
        else:
            self._crashes += 1
        if self._kills >= MAX_KILLS:
            self._kills = 0
            raise SequencePoisoned(f"{MAX_KILLS} engines were killed over this reply: {death.cause}")

    def reset(self) -> None:
        """Set the count to zero: the branch sampled a token."""
        self._crashes = self._kills = 0
