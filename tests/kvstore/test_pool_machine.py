"""Random lives of sequences over pool and index, against a shadow of plain dicts.

Several steps are in flight; each remembers the blocks it may touch, so a block allocated too early is caught by
what it would do, not by how the fence is built. A sequence's tokens are 0s and 1s, one per block; a block's
key is the string of all tokens up to it, so chains meet often and the shadow needs no hashing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from holdfast.kvstore.errors import BlockMisused, PoolExhausted, StepOutOfOrder
from holdfast.kvstore.pool import BlockPool, BlockState

BLOCKS = 12
TOKENS = st.binary(min_size=1, max_size=6).map(lambda raw: bytes(byte % 2 for byte in raw))
ROOT = b"root"


@dataclass(eq=False)
class Life:
    """One sequence: its tokens, their blocks, how many are sealed, and its name in the owner tags."""

    name: int
    tokens: bytes = b""
    blocks: list[int] = field(default_factory=list)
    sealed: int = 0


class Lives(RuleBasedStateMachine):
    """Sequences open, grow, seal, fork, shrink and close while steps come and go."""

    lives = Bundle("lives")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, debug=True)
        self.alive: list[Life] = []
        self.references: Counter[int] = Counter()
        self.block_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.fences: dict[int, int] = {}
        self.touched: dict[int, set[int]] = {}
        self.names = self.steps = self.evictions = 0

    # --- the shadow's answers -------------------------------------------------------------------------

    def state(self, block: int) -> BlockState:
        if self.references[block]:
            return BlockState.HELD
        if block in self.fences:
            return BlockState.FENCED
        return BlockState.CACHED if block in self.key_of else BlockState.FREE

    def having(self, state: BlockState) -> set[int]:
        return {block for block in range(BLOCKS) if self.state(block) is state}

    def held(self) -> dict[int, int]:
        return dict(Counter(block for life in self.alive for block in life.blocks))

    # --- what lives do, to the pool and to the shadow -------------------------------------------------

    def born(self) -> Life:
        self.names += 1
        life = Life(self.names)
        self.alive.append(life)
        return life

    def lease(self, life: Life, count: int) -> bool:
        free, cached = self.having(BlockState.FREE), self.having(BlockState.CACHED)
        if count > len(free) + len(cached):
            told = f"{count} blocks needed, {len(free) + len(cached)} available"
            with pytest.raises(PoolExhausted, match=told):
                self.pool.allocate(count, life.name)
            return False
        taken = self.pool.allocate(count, life.name).blocks
        assert len(set(taken)) == len(taken) == count
        assert set(taken) <= free | cached
        assert not any(touched.intersection(taken) for touched in self.touched.values()), (
            "used while a step runs"
        )
        evicted = cached.intersection(taken)
        assert len(evicted) == max(0, count - len(free)), "evicts only what free blocks cannot give"
        for block in evicted:
            del self.block_of[self.key_of.pop(block)]
        self.evictions += len(evicted)
        self.references.update(taken)
        life.blocks += taken
        return True

    def share(self, life: Life, blocks: list[int]) -> None:
        self.pool.share(blocks, life.name, behind=life.blocks)
        self.references.update(blocks)
        for block in blocks:
            self.fences.pop(block, None)
        life.blocks += blocks

    def let_go(self, life: Life, blocks: list[int], keep: bool = True) -> None:
        self.pool.release(blocks, life.name, keep=keep)
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                if not keep and block in self.key_of:
                    del self.block_of[self.key_of.pop(block)]
                if self.touched:
                    self.fences[block] = self.steps

    # --- rules ----------------------------------------------------------------------------------------

    @rule(target=lives, tokens=TOKENS)
    def open(self, tokens: bytes) -> Life:
        """Match, hold what matched, lease the rest."""
        life = self.born()
        self.find_more(life, tokens)
        if self.lease(life, len(tokens) - len(life.tokens)):
            life.tokens = tokens
        return life

    @rule(life=lives, more=TOKENS)
    def find_more(self, life: Life, more: bytes) -> None:
        """Match behind what is held, as a sequence does that was extended."""
        if life.sealed < len(life.tokens):
            return
        tokens = life.tokens + more
        keys = [tokens[: end + 1] for end in range(len(life.tokens), len(tokens))]
        expected: list[int] = []
        for key in keys:
            if key not in self.block_of:
                break
            expected.append(self.block_of[key])
        assert [*map(self.pool.index.here.get, keys)] == [*map(self.block_of.get, keys)]
        self.share(life, expected)
        life.tokens, life.sealed = tokens[: len(life.blocks)], len(life.blocks)

    @rule(life=lives, tokens=TOKENS, computed=st.booleans())
    def grow(self, life: Life, tokens: bytes, computed: bool) -> None:
        if self.lease(life, len(tokens)):
            life.tokens += tokens
        if computed:
            self.seal(life)

    @rule(tokens=TOKENS)
    def come_and_go(self, tokens: bytes) -> None:
        """A one-off prefix, or a hit."""
        life = self.open(tokens)
        self.seal(life)
        self.close(life, keep=True)

    @rule(life=lives, upto=st.integers(1, 12))
    def seal(self, life: Life, upto: int = 99) -> None:
        while life.sealed < min(upto, len(life.blocks)):
            self.seal_one(life, life.tokens[: life.sealed + 1], life.blocks[life.sealed])
            life.sealed += 1

    def seal_one(self, life: Life, key: bytes, block: int) -> None:
        standing = self.pool.join(block, key, life.name)
        assert standing == self.block_of.get(key, block)
        life.blocks[life.sealed] = standing
        self.references.subtract([block])
        self.references.update([standing])
        self.fences.pop(standing, None)
        if not self.references[block] and self.touched:
            self.fences[block] = self.steps
        self.key_of[standing], self.block_of[key] = key, standing

    @rule(target=lives, life=lives, keep=st.integers(0, 8))
    def fork(self, life: Life, keep: int) -> Life:
        """A child shares what is sealed."""
        keep = min(keep, life.sealed)
        child = self.born()
        self.share(child, life.blocks[:keep])
        child.tokens, child.sealed = life.tokens[:keep], keep
        return child

    @rule(life=lives, keep=st.integers(0, 8))
    def truncate(self, life: Life, keep: int) -> None:
        self.let_go(life, life.blocks[keep:])
        del life.blocks[keep:]
        life.tokens, life.sealed = life.tokens[:keep], min(life.sealed, keep)

    @rule(life=consumes(lives), keep=st.booleans())
    def close(self, life: Life, keep: bool) -> None:
        self.let_go(life, life.blocks, keep)
        self.alive.remove(life)

    @precondition(lambda self: len(self.touched) < 3)
    @rule()
    def launch(self) -> None:
        self.steps += 1
        self.pool.launched(self.steps)
        self.touched[self.steps] = set(self.held())

    @precondition(lambda self: self.touched)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """A step and all before it: the device works in order."""
        step = data.draw(st.sampled_from(sorted(self.touched)))
        self.pool.finished(step)
        self.touched = {later: blocks for later, blocks in self.touched.items() if later > step}
        self.fences = {block: fence for block, fence in self.fences.items() if fence > step}

    # --- mistakes change nothing (the invariants look) ------------------------------------------------

    @rule(life=lives, block=st.integers(-2, BLOCKS + 2))
    def misuse(self, life: Life, block: int) -> None:
        with pytest.raises(BlockMisused):  # not held by this one, or named twice
            self.pool.release([*life.blocks, block], life.name)
        if not self.references[block]:
            with pytest.raises(BlockMisused):
                self.pool.join(block, b"any", life.name)
            if block not in self.key_of:
                with pytest.raises(BlockMisused):
                    self.pool.share([*life.blocks, block], life.name)

    @rule(ahead=st.integers(1, 3))
    def count_steps_wrongly(self, ahead: int) -> None:
        with pytest.raises(StepOutOfOrder):
            self.pool.finished(self.steps + ahead)
        if self.steps:
            with pytest.raises(StepOutOfOrder):
                self.pool.launched(self.steps + 1 - ahead)

    # --- what is true after every move ----------------------------------------------------------------

    @invariant()
    def the_books_agree(self) -> None:
        assert self.held() == +self.references
        assert not any(self.pool.audit_in_slices(life.blocks for life in self.alive))
        for block in range(BLOCKS):
            assert self.pool.state(block) is self.state(block)
            assert self.pool.references.of(block) == self.references[block]
            assert self.pool.index.key_of(block) == self.key_of.get(block)

    @invariant()
    def the_numbers_agree(self) -> None:
        now = self.pool.statistics()
        states = Counter(self.state(block) for block in range(BLOCKS))
        shown = {"free": now["free"], "held": now["held"], "cached": now["cached"], "fenced": now["fenced"]}
        assert +Counter(shown) == states
        assert now["free"] + now["held"] + now["cached"] + now["fenced"] == now["blocks"] == BLOCKS
        assert now["available"] == self.pool.available == now["free"] + now["cached"]
        assert (now["sealed"], now["in_flight"], now["evicted"]) == (
            len(self.key_of),
            len(self.touched),
            self.evictions,
        )

    def teardown(self) -> None:
        for life in self.alive:
            self.let_go(life, life.blocks)
        if self.touched:
            self.pool.finished(self.steps)
        assert not any(self.pool.audit_in_slices([]))
        assert self.pool.available == BLOCKS


class KeptLives(Lives):
    """With everything kept: then no eviction ever cuts a chain."""

    def let_go(self, life: Life, blocks: list[int], keep: bool = True) -> None:
        super().let_go(life, blocks, True)

    @invariant()
    def what_is_found_is_found_from_the_beginning(self) -> None:
        assert all(len(key) == 1 or key[:-1] in self.block_of for key in self.block_of)


TestLives = Lives.TestCase
TestKeptLives = KeptLives.TestCase
