"""Policies: in what order turns run and give way, and which idle sequence loses its KV first.

A policy decides order and nothing else. Budgets, blocks, leases and the step fence are the scheduler's, and one
rule holds under each policy: the turn that runs first keeps that place until it ends, and is never preempted.
So some turn always makes progress. That each turn makes progress is the policy's `bound`; `Aged` gives one to a
policy that has none. ``README.md`` beside this file says how to write a policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from importlib import import_module
from operator import attrgetter

from ..errors import SettingsInvalid
from ..sequence import Sequence

by_age = attrgetter("place")
"""Sorts turns by age, the oldest first. A lease of priority p makes a turn as old as one 32 p turns before
it."""


class Policy(ABC):
    """An order of turns. It owns its state and changes nothing else.

    ``steady``: two turns never change their order, so that `order` need be asked only when one is added.
    """

    steady = False

    @abstractmethod
    def order(self, turns: list[Sequence], step: int) -> list[Sequence]:
        """``turns`` in the order in which they are to run, as a new list; each has a turn.

        Asked for the waiting turns and for the running ones but the first. Waiting turns are admitted from the
        front. Running ones get rows from the front and are preempted from the end. ``step``: steps planned so
        far.
        """

    def idle_victim(self, idle: Iterable[Sequence], longest: Sequence, now: float) -> Sequence:
        """The one of ``idle`` that loses its KV next; by default ``longest``, which is likely to stay away
        longest.

        ``idle``: in no order. ``now``: seconds, by the clock of ``Sequence.used`` and ``Sequence.returns``.
        """
        return longest

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """A step has computed ``tokens`` tokens of ``sequence``, for the first time or again."""
        return

    def bound(self, older: int, own: int) -> int | None:
        """Steps within which a turn ends; None: this policy promises nothing, and is to be aged.

        ``older``: steps within which all turns before it end. ``own``: what it needs itself once it runs first
        (`SchedulerSettings.most_steps`). A turn that began later and yet went before it may cost it as much as
        that turn's own. ``bound(0, 0)`` is the number of steps after which no younger turn goes before it.
        """
        return None


class FirstComeFirstServed(Policy):
    """The oldest turn first; the youngest gives way first."""

    steady = True

    def order(self, turns: list[Sequence], step: int) -> list[Sequence]:
        """By age."""
        return sorted(turns, key=by_age)

    def bound(self, older: int, own: int) -> int:
        """Turns end one after the other, at worst."""
        return older + own


class Aged(Policy):
    """Another policy's order, but turns that are ``patience`` steps old come before all others, by age.

    So each turn ends: once it is that old no younger turn is put before it, and those before it end.
    """

    def __init__(self, policy: Policy, patience: int) -> None:
        self._policy = policy
        self._patience = patience

    def order(self, turns: list[Sequence], step: int) -> list[Sequence]:
        """The old ones by age, then the others as the wrapped policy has them."""
        since = step - self._patience
        old = [turn for turn in turns if turn.place.step <= since]
        others = [turn for turn in turns if turn.place.step > since]
        return sorted(old, key=by_age) + self._policy.order(others, step)

    def idle_victim(self, idle: Iterable[Sequence], longest: Sequence, now: float) -> Sequence:
        """The wrapped policy's."""
        return self._policy.idle_victim(idle, longest, now)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Tell the wrapped policy."""
        self._policy.charge(sequence, tokens)

    def bound(self, older: int, own: int) -> int:
        """Until it is old, or those before it have ended; then its own steps."""
        return max(self._patience, older) + own


NAMED = {"first_come_first_served": f"{__name__}:FirstComeFirstServed"}
"""Each policy's name and its ``package.module:Class``."""


def policy_named(name: str, patience: int) -> Policy:
    """A new policy by its name in `NAMED`, or by ``package.module:Class``; aged if it has no bound of its own.

    Raises `SettingsInvalid`: there is no such policy.
    """
    policy = _imported(NAMED.get(name, name))()
    return policy if policy.bound(0, 0) is not None else Aged(policy, patience)


def _imported(name: str) -> type[Policy]:
    module, colon, kind = name.partition(":")
    try:
        found = getattr(import_module(module), kind) if colon else None
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsInvalid(f"policy {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise SettingsInvalid(
            f"policy is {name!r}: neither {', '.join(NAMED)} nor package.module:Class of a Policy"
        )
    return found
