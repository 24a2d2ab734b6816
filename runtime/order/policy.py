"""Policies: in what order turns run and give way, and which idle sequence loses its KV first.

A policy decides only order and shares. Budgets, blocks, leases and the step fence are the scheduler's. One rule
holds under each policy: the turn that runs first keeps that place until it ends, and is never preempted. So
some turn always makes progress. The policy's `bound` promises that each turn ends; `Aged` adds a bound to a
policy that has none. The default is `fair_shares`. ``README.md`` beside this file says how to write a policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from operator import attrgetter
from pkgutil import resolve_name

from ..errors import SettingsInvalid
from ..sequence import Sequence

by_age = attrgetter("age")
"""Sort key: turns by age, the oldest first. A lease of priority p makes a turn as old as the one that began
32 p turns earlier."""


class Policy(ABC):
    """An order of turns. It owns its state and changes nothing else.

    ``steady``: the order of two turns never changes, so `order` is called only when a turn is added.
    ``by_tenant``: a turn waits only for older turns of its own tenant, see `bound`.
    """

    steady = False
    by_tenant = False

    @abstractmethod
    def order(self, turns: list[Sequence], step: int) -> list[Sequence]:
        """``turns`` in the order in which they are to run, as a new list. Each of the sequences has a turn.

        Called with the waiting turns of one `line`, which are admitted from the front; the default `rows` calls
        it with the running turns. ``step``: the number of steps planned so far.
        """

    def rows(self, running: list[Sequence], step: int) -> list[Sequence]:
        """The running turns in the order in which they get rows of a step, as a new list. Turns are preempted
        from its end.

        By default the order of `order`. The turn that has the first place keeps it, wherever it is in this
        list.
        """
        return self.order(running, step)

    def line(self, sequence: Sequence) -> int:
        """The number of the line in which a turn waits. In a line, no turn overtakes one that does not fit yet.

        By default all turns wait in one line.
        """
        return 0

    def admit(self, heads: list[Sequence], running: Items[Sequence]) -> list[Sequence]:
        """``heads``, the first turns of all lines, in the order in which to try them. A turn that fits is
        admitted."""
        return heads

    def displaced(self, head: Sequence, running: Items[Sequence], *, by_tokens: bool) -> Iterator[Sequence]:
        """Running turns that are to wait again so that the waiting turn ``head`` can run, in order. The first
        of ``running`` is never one of them.

        ``by_tokens``: False if ``head`` lacks a place, True if it lacks blocks. By default there are none.
        """
        return iter(())

    def limits(self, wanted: Mapping[int, int], chunk: int) -> Mapping[int, int]:
        """The most prompt tokens of each tenant in a step. ``chunk``: the most for all tenants together.

        ``wanted``: the tokens that running turns have to compute, by tenant, in the order of their rows. By
        default it is returned as it is: then only the order of rows decides.
        """
        return wanted

    def lead(self, heads: list[Sequence], running: list[Sequence]) -> Sequence | None:
        """The turn that gets the first place, after the turn that had it has ended. It is one of ``running`` or
        of ``heads``, the first turns of all lines; by default the first of ``running``.

        None: the turn that is admitted next.
        """
        return running[0] if running else None

    def idle_victim(self, idle: Iterable[Sequence], longest: Sequence, now: float) -> Sequence:
        """The one of ``idle`` that loses its KV next. By default ``longest``.

        ``idle``: sequences that hold blocks, without a turn and without a lease, in no order. ``longest``: the
        one expected to stay idle longest. ``now``: seconds, by the clock of ``Sequence.used`` and
        ``Sequence.returns``.
        """
        return longest

    def charge(self, tenant: int, tokens: int) -> None:
        """Called when a step has computed ``tokens`` tokens of a tenant's sequences, for the first time or
        again, so that the policy can count them for its shares; perhaps several times for a step. By default
        it does nothing."""
        return

    def bound(self, older: int, own: int, others: int = 0) -> int | None:
        """The number of steps within which a turn ends. None: the policy promises none; it needs `Aged`.

        ``older``: steps within which all older turns end; if ``by_tenant``, all older turns of its tenant.
        ``own``: steps that the turn itself needs once it runs first (`SchedulerSettings.most_steps`).
        ``others``: steps that one turn of each other tenant needs. Each younger turn that went before it may
        add that turn's own steps. ``bound(0, 0)`` is the number of steps after which no younger turn goes
        before it.
        """
        return None


class FirstComeFirstServed(Policy):
    """The oldest turn first; the youngest gives way first."""

    steady = True

    def order(self, turns: list[Sequence], step: int) -> list[Sequence]:
        """The turns by age, the oldest first."""
        return sorted(turns, key=by_age)

    def bound(self, older: int, own: int, others: int = 0) -> int:
        """The number of steps within which a turn ends: at worst, turns end one after the other."""
        return older + own


class Aged(Policy):
    """Another policy's order, except that turns that are ``patience`` steps old come first, the oldest first.

    So each turn ends: once it is that old, no younger turn is put before it, and the older turns end. Of the
    other policy only `order`, `idle_victim` and `charge` are used: lines and shares cannot be aged.
    """

    def __init__(self, policy: Policy, patience: int) -> None:
        self._policy = policy
        self._patience = patience

    def order(self, turns: list[Sequence], step: int) -> list[Sequence]:
        """Turns that are ``patience`` steps old by age, then the other turns in the wrapped policy's order."""
        since = step - self._patience
        old = [turn for turn in turns if turn.age.step <= since]
        others = [turn for turn in turns if turn.age.step > since]
        return sorted(old, key=by_age) + self._policy.order(others, step)

    def idle_victim(self, idle: Iterable[Sequence], longest: Sequence, now: float) -> Sequence:
        """The wrapped policy's choice."""
        return self._policy.idle_victim(idle, longest, now)

    def charge(self, tenant: int, tokens: int) -> None:
        """Pass the call on to the wrapped policy."""
        self._policy.charge(tenant, tokens)

    def bound(self, older: int, own: int, others: int = 0) -> int:
        """The number of steps within which a turn ends: ``patience``, or the steps of the older turns if
        these are more; then its own."""
        return max(self._patience, older) + own


NAMED = {
    "fair_shares": f"{__name__.rpartition('.')[0]}.fair_shares:FairShares",
    "first_come_first_served": f"{__name__}:FirstComeFirstServed",
}
"""The named policies: from the name to ``package.module:Class``."""


def policy_named(name: str, patience: int) -> Policy:
    """A new policy by its name in `NAMED`, or by ``package.module:Class``.

    A policy without a bound is wrapped in `Aged`. ``patience``: see there.

    Raises `SettingsInvalid`: there is no such policy.
    """
    try:
        found: object = resolve_name(NAMED.get(name, name))
    except (ImportError, AttributeError, ValueError) as error:
        found = error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        known = ", ".join(NAMED)
        raise SettingsInvalid(f"policy {name!r} is neither {known} nor package.module:Class: {found}")
    policy = found()
    return policy if policy.bound(0, 0) is not None else Aged(policy, patience)
