"""Which sessions are forgotten: those that were not used for long, and those beyond what the journal, or a
tenant's share of it, may have.

Each tenant's sessions are in the order of their last use. Of a journal that has too many or too much, the
tenant that holds most gives some up, its forks that no client has opened first; of a share, the tenant's
longest unused. None that is open in memory is forgotten. What this costs does not grow with the number of
sessions. Knows no files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import islice

from ..settings import JournalShare
from .session_states import SessionState, SessionStates

NO_SHARE = JournalShare()


@dataclass(slots=True)
class _Holding:
    """What one tenant has in the journal. ``share``: the most that it may have. ``kept``: its sessions that are
    not forgotten, the longest unused first; ``unopened``: those of them that are forks which no client has
    opened. ``bytes``: of all its sessions, also of those that only forks need."""

    share: JournalShare
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict)
    unopened: OrderedDict[int, None] = field(default_factory=OrderedDict)
    bytes: int = 0

    def unused(self, live: Container[int]) -> Iterator[int]:
        """Its sessions that are not in ``live``, the first to be forgotten first."""
        yield from (number for number in self.unopened if number not in live)
        yield from (number for number in self.kept if number not in live and number not in self.unopened)


class Retention:
    """The sessions of all tenants, in the order in which they are forgotten. ``states``: those of the sessions.
    ``shares``: of the tenants that have one, by salt."""

    def __init__(self, states: SessionStates, shares: Mapping[bytes, JournalShare]) -> None:
        self._states = states
        self._held = {salt: _Holding(share) for salt, share in shares.items()}
        self._changed: set[bytes] = set()
        self._over: set[bytes] = set()
        self._kept = 0

    def enter(self, state: SessionState) -> None:
        """Take in a session that was there when the store was opened, with its ``counted`` bytes; they come in
        the order of their last use."""
        size, state.counted = state.counted, 0
        self.count(state, size)

    def count(self, state: SessionState, size: int) -> None:
        """Note that a session's records take ``size`` bytes now: it was written to, or forgotten. The state is
        one that may be changed."""
        held = self._held.get(state.salt)
        if held is None:
            held = self._held[state.salt] = _Holding(NO_SHARE)
        held.bytes += size - state.counted
        state.counted = size
        self._kept -= state.number in held.kept
        held.kept.pop(state.number, None)
        if state.kept:
            held.kept[state.number] = None
            self._kept += 1
        self.opened(state)
        if held.share is not NO_SHARE:
            self._changed.add(state.salt)
            (self._over.add if held.bytes > held.share.bytes else self._over.discard)(state.salt)
        elif not held.kept and not held.bytes:
            del self._held[state.salt]

    def opened(self, state: SessionState) -> None:
        """Called when a session has another keyring, and may be an unopened fork no more."""
        held = self._held[state.salt]
        if state.kept and state.is_unopened_fork:
            held.unopened[state.number] = None
        else:
            held.unopened.pop(state.number, None)

    def aged(self, oldest: float, live: Container[int]) -> list[int]:
        """The sessions that were last used before the time ``oldest``, in microseconds of the store's clock,
        and are not in ``live``."""
        gone: list[int] = []
        for held in self._held.values():
            for number in held.kept:
                if self._states[number].used >= oldest:
                    break
                if number not in live:
                    gone.append(number)
        return gone

    def beyond(self, most: int, live: Container[int]) -> list[int]:
        """The sessions to forget so that ``most`` are left: each of the tenant that has most at that moment."""
        return self._from_the_largest(self._kept - most, live, lambda held: len(held.kept), lambda number: 1)

    def largest(self, count: int, live: Container[int]) -> list[int]:
        """``count`` sessions to forget, each of the tenant that has most bytes at that moment."""
        return self._from_the_largest(
            count, live, lambda held: held.bytes, lambda number: max(1, self._states[number].counted)
        )

    def _from_the_largest(
        self,
        count: int,
        live: Container[int],
        holds: Callable[[_Holding], int],
        weigh: Callable[[int], int],
    ) -> list[int]:
        if count <= 0:
            return []
        queues = {salt: held.unused(live) for salt, held in self._held.items()}
        tenants = [(-holds(held), salt) for salt, held in self._held.items()]
        heapify(tenants)
        gone: list[int] = []
        while tenants and len(gone) < count:
            held, salt = tenants[0]
            number = next(queues[salt], None)
            if number is None:
                heappop(tenants)
            else:
                gone.append(number)
                heapreplace(tenants, (held + weigh(number), salt))
        return gone

    # --- shares ---------------------------------------------------------------------------------------------

    def look_again(self, salt: bytes) -> None:
        """Called when a session of this tenant was closed, so that it may be forgotten now: lets the next
        `surplus` look at the tenant."""
        if self._held.get(salt, _NOTHING).share is not NO_SHARE:
            self._changed.add(salt)

    def surplus(self, live: Container[int], most: int) -> list[int]:
        """The numbers of up to ``most`` sessions that the caller has to erase: those of one tenant beyond its
        share, the longest unused first, none in ``live``, the sessions in memory. Erase them and call again,
        until there are none."""
        while self._changed:
            salt = next(iter(self._changed))
            if gone := list(islice(self._surplus(self._held[salt], live), most)):
                return gone
            self._changed.discard(salt)
        return []

    def _surplus(self, held: _Holding, live: Container[int]) -> Iterator[int]:
        sessions, size = len(held.kept), held.bytes
        for number in held.kept:
            if sessions <= held.share.sessions and size <= held.share.bytes:
                return
            if number not in live:
                sessions, size = sessions - 1, size - self._states[number].counted
                yield number

    def full(self) -> frozenset[bytes]:
        """The salts of the tenants with more bytes in the journal than their share."""
        return frozenset(self._over)

    def statistics(self, salt: bytes) -> dict[str, float]:
        """How many sessions the journal keeps of a tenant (``kept``), and their bytes (``journal``); empty if
        it has no share."""
        held = self._held.get(salt, _NOTHING)
        if held.share is NO_SHARE:
            return {}
        return {"kept": float(len(held.kept)), "journal": float(held.bytes)}


_NOTHING = _Holding(NO_SHARE)
