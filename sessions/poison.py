"""Whether a session's tokens kill engines: the poison rule, as one small account per branch.

An engine's death accuses the sequences of the step it died in, unless somebody else killed it. A branch that
was accused ``TRIAL`` times goes on alone: its sequence shares no step with others until it has sampled a
token. If an engine dies then, there is nobody else it can have been; if a token comes, the branch is cleared.
Sequence ids are new in every engine, so the account is the branch's, and outlives turns: a poisoned prompt
that is tried again costs one engine, not three.
"""

from __future__ import annotations

from ..runtime.link.crash_report import EngineDeath
from .errors import SequencePoisoned

TRIAL = 2  # deaths after which a branch is computed alone
MOST_KILLED = 16  # deaths by others' hands without a token between them, such as a kernel short of memory


class PoisonRule:
    """The account of one branch."""

    def __init__(self) -> None:
        self._accused = 0
        self._killed = 0

    @property
    def alone(self) -> bool:
        """Whether its sequence must share no step."""
        return self._accused >= TRIAL

    def weigh(self, death: EngineDeath, seq: int, alone: bool) -> None:
        """An engine died that held the branch as ``seq``, opened ``alone`` or not.

        Raises ``SequencePoisoned`` when it can have been nobody else.
        """
        if seq not in death.step:
            return
        if death.outside:
            self._killed += 1
        elif alone and len(death.step) == 1:
            raise SequencePoisoned(f"The model's engine dies of this conversation: {death.cause}")
        else:
            self._accused += 1
        if self._killed >= MOST_KILLED:
            self._killed = 0
            raise SequencePoisoned(f"{MOST_KILLED} engines were killed over this reply: {death.cause}")

    def progressed(self) -> None:
        """A token came: whatever killed engines, it was not the next token of this branch."""
        self._accused = self._killed = 0
