"""The scheduler: verbs in, plans out, outcomes back in. Pure: no tensors, no clock, no I/O.

::

    verbs ──▶ Verbs ─┐
                     ▼
                  Queues (who, in what order) ──▶ Planner ──▶ plan ──▶ (runner) ──▶ Committer ──▶ rows
                     ▲                              │ ▲                                 │
                     └──────── Preemption ◀───────────┘ └── BlockManager (whose blocks) ◀───────┘

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
from ..grammar.queue import GrammarQueue
from ..kv_placement.block_manager import BlockManager
from ..kv_placement.costs import CostBook
from ..kv_placement.leases import Leases
from ..kv_placement.offload import POLL_SECONDS, Offload
from ..kv_placement.restore import Restore
from ..kv_placement.transfers import Transfers
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
from .pending_moves import PendingMoves
from .planner import Planner
from .preemption import Preemption
from .prefill_budget import PrefillBudget
from .queues import Queues
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
        self._queues = Queues()
        beside = costs is not None and costs.beside
        self._transfers = Transfers(tier, pool.index.block_of, settings.block_tokens, disk, beside=beside)
        self._block_manager = BlockManager(pool, hasher, namespace, self._transfers)
        preemption = Preemption(settings, self._queues, self._block_manager, self.counters)
        self._prefill_budget = PrefillBudget(settings.idle_stretch)
        self._planner = Planner(
            settings, self._queues, self._block_manager, preemption, self._prefill_budget, self.counters
        )
        fetching = Restore(self._queues, self._block_manager, preemption, self.counters, disk, costs)
        self.offload = Offload(self._block_manager, disk, fetching)
        self._leases = Leases(settings, self._queues, self._block_manager, self.offload)
        self._pending_moves = PendingMoves(self._queues, self._block_manager, self.offload)
        self._committer = Committer(
            self._queues, self._block_manager, self.offload, self._leases, self.counters
        )
        self._grammar_queue = GrammarQueue(compiler, self._queues, self._committer, self.offload)
        self._verbs = Verbs(
            settings,
            self._queues,
            self._block_manager,
            self._committer,
            self.offload,
            self._leases,
            self.counters,
            self._grammar_queue,
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
        sequence = self._queues[verb.seq]
        if isinstance(verb, Stage):
            move = self._pending_moves.before(verb.request, sequence, now)
            self.apply(verb)
            self._pending_moves.stage(move)
        else:
            self.apply(verb)
            self._pending_moves.settle(verb.request, sequence, now, disk=verb.disk)

    def note(self, now: float) -> None:
        """So late it is, and nothing more is done about it."""
        self._queues.idle_eviction.now = now

    def tick(self, now: float) -> None:
        """So late it is: what the disk says, leases that end, KV that is expected back, grammars."""
        self.note(now)
        self._leases.tick(now)
        self.offload.tick(now)
        self._grammar_queue.tick(now)

    def look(self, now: float, *, idle: bool) -> None:
        """See who has what he waits for; ``idle``: there was nothing to plan."""
        self._pending_moves.tick(now, idle=idle)

    def prepare(self) -> bool:
        """In an idle moment: do ahead what a later step would wait for; False: there is nothing left of it."""
        tier = self._transfers.tier
        return tier is not None and tier.prepare()

    def rows(self) -> list[Row]:
        """Of turns that went on or ended without a step, since this was asked last."""
        return self._grammar_queue.rows()

    def answers(self) -> list[Reply]:
        """To verbs that were followed, and are done since this was asked last."""
        return self._pending_moves.answers()

    def due(self, now: float) -> float | None:
        """Seconds until `tick` has something to do if nothing else happens; None: never."""
        pending_moves = POLL_SECONDS if self._pending_moves.busy else None
        dues = (self.offload.due(now), self._leases.due(now), pending_moves, self._grammar_queue.due())
        return min((due for due in dues if due is not None), default=None)

    def plan(self) -> Plan | None:
        """The next step; it counts as launched. None: nothing to do before a commit or a verb."""
        return self._planner.plan()

    def took(self, plan: Plan, seconds: float) -> None:
        """The device was so long busy with a step: what later ones may carry beside turns depends on it."""
        self._prefill_budget.took(plan, seconds)

    def plan_alone(self, seq: int) -> Plan | None:
        """A step for this sequence alone, to find out whether it is the one that fails."""
        return self._planner.plan_alone(self._queues[seq])

    def commit(self, plan: Plan, outcomes: Items[Outcome], *, moved: bool = True) -> list[Row]:
        """``plan`` is done; ``outcomes`` are aligned with its rows. Not ``moved``: it failed as a whole."""
        return self._committer.commit(plan, outcomes, moved=moved)

    def revoke(self, plans: Iterable[Plan]) -> list[int]:
        """Take back these plans, all that are in flight, which failed as a whole; returns their sequences."""
        self.counters.isolations += 1
        return list(dict.fromkeys(s.id for plan in plans for s in self._committer.revoke(plan)))

    def evict(self, seq: int) -> int:
        """Take a sequence's KV as preemption would; it is computed again when wanted. Returns its blocks."""
        sequence = self._queues[seq]
        blocks = self._block_manager.surrender(sequence)
        if sequence.turn is None:
            self._queues.taken(sequence)
        return blocks

    def state(self, seq: int) -> State:
        """What is held of a sequence. Raises `SequenceUnknown`."""
        return self._queues[seq].state

    @property
    def tier(self) -> HostTier | None:
        """The tier below the device."""
        return self._transfers.tier

    def statistics(self) -> dict[str, float]:
        """Lengths of all queues, the pool's books, and counts since the start."""
        queues = self._queues
        gauges = {
            "sequences": len(queues.sequences),
            "running": len(queues.running),
            "waiting": len(queues.waiting),
            "idle_holding": len(queues.idle_eviction) + len(queues.leased),
            "idle_expected": queues.idle_eviction.told,
            "idle_prefill": len(queues.prefill),
        }
        pool = {f"pool_{name}": value for name, value in asdict(self.pool.statistics()).items()}
        return {
            **gauges,
            **pool,
            **self._transfers.statistics(),
            **self.offload.statistics(),
            **self._leases.statistics(),
            **self._grammar_queue.statistics(),
            **asdict(self.counters),
        }

    def audit(self) -> None:
        """Check that the pool's references are those of the open sequences, to the block, and the tier's books.

        Raises:
            LeakFound: they are not.
        """
        self.pool.audit(self._block_manager.held(self._queues.sequences.values()))
        self._transfers.audit()
