"""The scheduler: verbs in, plans out, outcomes back in. Pure: no tensors, no clock, no I/O.

::

    verbs ──▶ Verbs ─┐
                     ▼
                  Roster (who, in what order) ──▶ Planner ──▶ plan ──▶ (runner) ──▶ Committer ──▶ rows
                     ▲                              │ ▲                                 │
                     └──────── Pressure ◀───────────┘ └── Paging (whose blocks) ◀───────┘

At depth 1 plan and commit alternate. At depth 2 a plan is made while the one before it is in flight: its rows
may be fed by tokens that the earlier one has still to sample. Plans are committed, or revoked, in the order
they were made.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import asdict

from ...kvstore.disk.client import DiskTier
from ...kvstore.host.tier import HostTier
from ...kvstore.keys import BlockHasher
from ...kvstore.pool import BlockPool
from ..counters import Counters
from ..errors import SettingsInvalid
from ..grammar.matcher import Compiler
from ..grammar.queue import Constraints
from ..kv_placement.block_manager import Paging
from ..kv_placement.costs import CostBook
from ..kv_placement.leases import Leases
from ..kv_placement.offload import POLL_SECONDS, Shelving
from ..kv_placement.restore import Fetching
from ..kv_placement.transfers import Moves
from ..link.messages import (
    Close,
    Extend,
    Fork,
    Generate,
    Lease,
    Open,
    Receipt,
    Reply,
    Row,
    Settle,
    Stage,
    State,
    Stop,
    Truncate,
)
from ..plan import Outcome, Plan
from ..settings import SchedulerSettings
from .commit import Committer
from .pending_moves import Errands
from .planner import Planner
from .preemption import Pressure
from .prefill_budget import Courtesy
from .queues import Roster
from .verbs import Verbs

SequenceVerb = Open | Extend | Truncate | Generate | Stop | Fork | Close | Stage | Settle


class Scheduler:
    """Decides what each step computes.

    Args:
        settings: the numbers it works within.
        pool: ``settings.blocks`` blocks, used by nobody else.
        hasher: names blocks of ``settings.block_tokens`` tokens.
        namespace: the digest of all that decides what a block's bytes mean.
        tier: keeps blocks below the device, under the same names; None without one.
        disk: keeps records of ``tier`` below it.
        costs: of restoring and computing, as measured; without any all is restored.
        compiler: of grammars; without one they are refused.

    Raises:
        SettingsInvalid: pool or hasher are made for other numbers.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        pool: BlockPool,
        hasher: BlockHasher,
        namespace: bytes = b"",
        tier: HostTier | None = None,
        disk: DiskTier | None = None,
        costs: CostBook | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        if pool.blocks != settings.blocks or hasher.block_tokens != settings.block_tokens:
            raise SettingsInvalid("the pool or the hasher is made for another number of blocks or block size")
        self.settings = settings
        self.pool = pool
        self.counters = Counters()
        self._roster = Roster()
        self._moves = Moves(tier, settings.block_tokens, disk, beside=costs is not None and costs.beside)
        self._paging = Paging(pool, hasher, namespace, self._moves)
        pressure = Pressure(settings, self._roster, self._paging, self.counters)
        self._courtesy = Courtesy(settings.idle_stretch)
        self._planner = Planner(settings, self._roster, self._paging, pressure, self._courtesy, self.counters)
        fetching = Fetching(self._roster, self._paging, pressure, self.counters, disk, costs)
        self.shelving = Shelving(self._paging, disk, fetching)
        self._leases = Leases(settings, self._roster, self._paging, self.shelving)
        self._errands = Errands(self._roster, self._paging, self.shelving)
        self._committer = Committer(self._roster, self._paging, self.shelving, self._leases, self.counters)
        self._constraints = Constraints(compiler, self._roster, self._committer, self.shelving)
        self._verbs = Verbs(
            settings,
            self._roster,
            self._paging,
            self._committer,
            self.shelving,
            self._leases,
            self.counters,
            self._constraints,
        )

    def apply(self, verb: SequenceVerb) -> State | None:
        """Do what a verb says, between a commit and the next plan; or raise a `VerbRefused`."""
        match verb:
            case Open():
                return self._verbs.open(verb)
            case Extend():
                return self._verbs.extend(verb)
            case Truncate():
                return self._verbs.truncate(verb)
            case Generate():
                return self._verbs.generate(verb)
            case Stop():
                return self._verbs.stop(verb)
            case Fork():
                return self._verbs.fork(verb)
            case Stage():
                return self._verbs.stage(verb)
            case Settle():
                return self._verbs.settle(verb)
            case Close():
                self._verbs.close(verb)
                return None

    def lease(self, verb: Lease, now: float) -> tuple[State, Receipt]:
        """The same for a lease, which has a receipt."""
        return self._verbs.lease(verb, now)

    def follow(self, verb: Stage | Settle, now: float) -> None:
        """The same, answered among `answers` when it is done."""
        sequence = self._roster[verb.seq]
        if isinstance(verb, Stage):
            errand = self._errands.before(verb.request, sequence, now)
            self.apply(verb)
            self._errands.stage(errand)
        else:
            self.apply(verb)
            self._errands.settle(verb.request, sequence, now, disk=verb.disk)

    def note(self, now: float) -> None:
        """So late it is, and nothing more is done about it."""
        self.shelving.now = self._roster.holders.now = now

    def tick(self, now: float) -> None:
        """So late it is: what the disk says, leases that end, KV that is expected back, grammars."""
        self.note(now)
        self._leases.tick(now)
        self.shelving.tick(now)
        self._constraints.tick(now)

    def look(self, now: float, *, idle: bool) -> None:
        """See who has what he waits for; ``idle``: there was nothing to plan."""
        self._errands.tick(now, idle=idle)

    def prepare(self) -> bool:
        """In an idle moment: do ahead what a later step would wait for; False: there is nothing left of it."""
        tier = self._moves.tier
        return tier is not None and tier.prepare()

    def rows(self) -> list[Row]:
        """Of turns that went on or ended without a step, since this was asked last."""
        return self._constraints.rows()

    def answers(self) -> list[Reply]:
        """To verbs that were followed, and are done since this was asked last."""
        return self._errands.answers()

    def due(self, now: float) -> float | None:
        """Seconds until `tick` has something to do if nothing else happens; None: never."""
        errands = POLL_SECONDS if self._errands.busy else None
        dues = (self.shelving.due(), self._leases.due(now), errands, self._constraints.due())
        return min((due for due in dues if due is not None), default=None)

    def plan(self) -> Plan | None:
        """The next step; it counts as launched. None: nothing to do before a commit or a verb."""
        return self._planner.plan()

    def took(self, plan: Plan, seconds: float) -> None:
        """The device was so long busy with a step: what later ones may carry beside turns depends on it."""
        self._courtesy.took(plan, seconds)

    def plan_alone(self, seq: int) -> Plan | None:
        """A step for this sequence alone, to find out whether it is the one that fails."""
        return self._planner.plan_alone(self._roster[seq])

    def commit(self, plan: Plan, outcomes: Items[Outcome], *, moved: bool = True) -> list[Row]:
        """``plan`` is done; ``outcomes`` are aligned with its rows. Not ``moved``: it failed as a whole."""
        return self._committer.commit(plan, outcomes, moved=moved)

    def revoke(self, plans: Iterable[Plan]) -> list[int]:
        """Take back these plans, all that are in flight, which failed as a whole; returns their sequences."""
        self.counters.isolations += 1
        return list(dict.fromkeys(s.id for plan in plans for s in self._committer.revoke(plan)))

    def evict(self, seq: int) -> int:
        """Take a sequence's KV as pressure would; it is computed again when wanted. Returns its blocks."""
        sequence = self._roster[seq]
        blocks = self._paging.surrender(sequence)
        if sequence.turn is None:
            self._roster.taken(sequence)
        return blocks

    def state(self, seq: int) -> State:
        """What is held of a sequence. Raises `SequenceUnknown`."""
        return self._roster[seq].state

    @property
    def tier(self) -> HostTier | None:
        """The tier below the device."""
        return self._moves.tier

    def statistics(self) -> dict[str, float]:
        """Lengths of all queues, the pool's books, and counts since the start."""
        roster = self._roster
        gauges = {
            "sequences": len(roster.sequences),
            "running": len(roster.running),
            "waiting": len(roster.waiting),
            "idle_holding": len(roster.holders) + len(roster.leased),
            "idle_expected": roster.holders.told,
            "idle_prefill": len(roster.prefill),
        }
        pool = {f"pool_{name}": value for name, value in asdict(self.pool.statistics()).items()}
        return {
            **gauges,
            **pool,
            **self._moves.statistics(),
            **self.shelving.statistics(),
            **self._leases.statistics(),
            **self._constraints.statistics(),
            **asdict(self.counters),
        }

    def audit(self) -> None:
        """Check that the pool's references are those of the open sequences, to the block, and the tier's books.

        Raises:
            LeakFound: they are not.
        """
        self.pool.audit(self._paging.held(self._roster.sequences.values()))
        self._moves.audit()
