"""The default policy: tenants share places, blocks and prefill equally, by tokens; inside a tenant the oldest
turn goes first.

A tenant is known by the salt of its block keys (`Sequence.tenant`). Four things are shared. A tenant that asks
for its share gets it from the tenant that has most, which gives up its newest turn first. If no other tenant
asks, one tenant may have everything.

- **Places** (`max_sequences`) and **blocks**: the waiting turn of the tenant with the fewest running turns is
  admitted first. If there is no place or there are no blocks for it, the newest turns of the tenant that holds
  most wait again (`displaced`). They keep their KV until another sequence needs the blocks.
- **Blocks that run short while turns grow**: turns are preempted from the end of `rows`. Turns are sorted there
  by the tokens of all turns of the same tenant up to and with this one, so the newest turn of the tenant that
  holds most is the last.
- **Prompt tokens of a step**: `limits`, by deficit round robin. Each tenant with prompts to compute has an
  equal part, at least `QUANTUM`. What a tenant does not use goes to the others. The tenant that was given the
  fewest tokens so far comes first, so a new tenant's first chunk is in the next step that is planned.
- **The first place**: the turn in it is never preempted and gets its chunk in each step. `lead` gives it to the
  oldest turn of each tenant in rotation. This rule alone guarantees the bound; the others make turns faster.

The bound, and why it holds: ``README.md`` beside this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from itertools import count

from ..sequence import Sequence
from .policy import FirstComeFirstServed, by_age

QUANTUM = 32
"""The least share of a step's prompt tokens that a tenant gets. If a step has too few tokens for all tenants,
they alternate."""


class FairShares(FirstComeFirstServed):
    """The default policy: tenants share places, blocks and prompt tokens equally; inside a tenant the oldest
    turn goes first. It keeps, for each tenant, how many tokens it was given, and its place in the rotation of
    the first place."""

    by_tenant = True

    def __init__(self) -> None:
        self._given: dict[int, int] = {}  # tokens given, by tenant; a new tenant starts at the minimum
        self._due: dict[int, int] = {}  # the rotation of the first place, by tenant: the smallest is next
        self._count = count(1)
        self._leader: int | None = None

    def line(self, sequence: Sequence) -> int:
        """The number of the queue in which a turn waits: the tenant's number, so each tenant has its own."""
        return sequence.tenant

    def charge(self, tenant: int, tokens: int) -> None:
        """Count ``tokens``, which a step has computed, for the tenant; prefill and decode alike."""
        self._given[tenant] = self._given.get(tenant, 0) + tokens

    def rows(self, running: list[Sequence], step: int) -> list[Sequence]:
        """The running turns, sorted by the tokens of the turn and all older turns of its tenant. So the last
        turn is one of the tenant that holds most."""
        by_age_order = sorted(running, key=by_age)
        if len({turn.tenant for turn in running}) < 2:
            return by_age_order
        held: dict[int, int] = {}
        stands: list[tuple[int, Sequence]] = []
        for turn in by_age_order:
            held[turn.tenant] = held.get(turn.tenant, 0) + turn.total
            stands.append((held[turn.tenant], turn))
        stands.sort(key=lambda stand: stand[0])  # stable: of equal ones the older goes first
        return [turn for _, turn in stands]

    def admit(self, heads: list[Sequence], running: Items[Sequence]) -> list[Sequence]:
        """``heads``, the first waiting turn of each tenant, in the order in which to admit them: the tenant
        with the fewest running turns first; of equal ones the one given the fewest tokens."""
        runs = Counter(turn.tenant for turn in running)
        self._meet(dict.fromkeys((*runs, *(head.tenant for head in sorted(heads, key=by_age)))))
        return sorted(heads, key=lambda head: (runs[head.tenant], self._given[head.tenant], head.age))

    def displaced(self, head: Sequence, running: Items[Sequence], *, by_tokens: bool) -> Iterator[Sequence]:
        """Running turns that are to wait again so that the waiting turn ``head`` can run: the newest turns of
        the tenant that holds most, as long as that makes the shares more equal. ``by_tokens``: shares are
        counted in tokens, else in turns.

        Let ``asked`` be what the tenant of ``head`` would hold with ``head`` running. The largest tenant
        gives a turn if it then still holds at least ``asked``, or if ``asked`` is at most half of what it
        held before. So two tenants cannot take the same place from each other again and again.
        """
        if all(turn.tenant == head.tenant for turn in running):
            return
        held: Counter[int] = Counter()
        turns: dict[int, list[Sequence]] = {}
        for turn in running:
            held[turn.tenant] += _weight(turn, by_tokens)
            if turn is not running[0]:
                turns.setdefault(turn.tenant, []).append(turn)
        for of_tenant in turns.values():
            of_tenant.sort(key=by_age)
        asked = held[head.tenant] + _weight(head, by_tokens)
        turns.pop(head.tenant, None)
        while turns:
            largest = max(turns, key=lambda tenant: held[tenant])
            newest = turns[largest].pop()
            left = held[largest] - _weight(newest, by_tokens)
            if asked > max(left, held[largest] / 2):
                return
            yield newest
            held[largest] = left
            if not turns[largest]:
                del turns[largest]

    def limits(self, wanted: Mapping[int, int], chunk: int) -> Mapping[int, int]:
        """The most prompt tokens of each tenant in a step: an equal part of ``chunk`` for each, then what
        others leave over. The tenant of the first row is served first. ``wanted``: the prompt tokens that
        each tenant's running turns have to compute, in the order of their rows; ``chunk``: the most for all
        tenants together."""
        given = {tenant: self._given.get(tenant, 0) for tenant in wanted}
        first, *others = wanted
        order = [first, *sorted(others, key=given.__getitem__)]
        share = max(QUANTUM, -(-chunk // len(wanted)))
        limits = dict.fromkeys(order, 0)
        for most in (share, chunk):  # first the equal parts, then what is left over
            for tenant in order:
                more = min(most, wanted[tenant] - limits[tenant], chunk)
                limits[tenant] += more
                chunk -= more
        return limits

    def lead(self, heads: list[Sequence], running: list[Sequence]) -> Sequence | None:
        """The turn that gets the first place, which is never preempted: the oldest turn, running or first in
        its queue (``heads``), of the tenant that has waited longest since it last had the first place, or
        since its first turn. None: there is no turn."""
        oldest: dict[int, Sequence] = {}
        for turn in sorted((*running, *heads), key=by_age):
            oldest.setdefault(turn.tenant, turn)
        self._meet(oldest)
        if self._leader in self._due:
            self._due[self._leader] = next(self._count)
        self._leader = min(oldest, key=self._due.__getitem__, default=None)
        return None if self._leader is None else oldest[self._leader]

    def bound(self, older: int, own: int, others: int = 0) -> int:
        """The number of steps within which a turn ends, a sum: those of the older turns of its tenant
        (``older``), those of one turn of each other tenant (``others``), and its own (``own``)."""
        return older + others + own

    def _meet(self, tenants: Mapping[int, object]) -> None:
        """Keep the state of the tenants in ``tenants`` alone. A new one starts with the fewest tokens that
        any of the others was given, and at the end of the rotation."""
        fewest = min((self._given[tenant] for tenant in tenants if tenant in self._given), default=0)
        self._given = {tenant: self._given.get(tenant, fewest) for tenant in tenants}
        self._due = {tenant: self._due.get(tenant) or next(self._count) for tenant in tenants}


def _weight(turn: Sequence, by_tokens: bool) -> int:
    return turn.total if by_tokens else 1
