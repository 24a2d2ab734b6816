"""A sequence's blocks: the only place where sequences and the pool meet.

Finds cached prefixes, leases blocks to write, copies a tail that is shared before it is written, names full
blocks, gives blocks back; has blocks kept in the host tier and brought up from it. Decides nothing: who may
have blocks is `preemption`'s affair, what is computed is `planner`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np

from ...kvstore.disk.client import DiskTier
from ...kvstore.keys import BlockHasher
from ...kvstore.pool import BlockPool
from ..plan import BlockCopy
from ..sequence import Sequence
from .residency import Residency
from .transfers import Transfers


class BlockManager:
    """Moves blocks between sequences and ``pool``; keys are made by ``hasher`` under ``namespace``."""

    def __init__(self, pool: BlockPool, hasher: BlockHasher, namespace: bytes, moves: Transfers) -> None:
        self.pool = pool
        self.transfers = moves
        self.block_tokens = hasher.block_tokens
        self.residency = Residency(pool.index, hasher, namespace, moves)
        self._sources: list[tuple[int, int]] = []  # (block, owner): read by copies of the step being planned

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens take up."""
        return -(-tokens // self.block_tokens)

    # --- taking -----------------------------------------------------------------------------------------

    def adopt(self, sequence: Sequence) -> int:
        """Ask the prefix cache for more than is computed, up to all but the last token; returns tokens found.

        The last token is never taken from the cache: its logits are wanted.
        """
        if sequence.planned != sequence.computed:
            return 0
        own, most = sequence.computed // self.block_tokens, (len(sequence.tokens) - 1) // self.block_tokens
        if most <= own:
            return 0
        self.residency.name(sequence, most)
        parent = sequence.keys[own - 1] if own else sequence.root
        match = self.pool.index.match(sequence.keys[own:most], parent)
        if not match.blocks:
            return 0
        self.pool.share(match.blocks, sequence.id, behind=sequence.table.view[:own])
        self._drop(sequence, own)
        sequence.table.extend(match.blocks)
        before = sequence.computed
        sequence.computed = sequence.planned = own * self.block_tokens + match.tokens
        sequence.sealed = len(sequence.table)
        sequence.shared_tail = False
        sequence.high_water = max(sequence.high_water, sequence.computed)
        return sequence.computed - before

    def restore(self, sequence: Sequence, keys: list[bytes]) -> int:
        """Lease blocks, which are available, for as many of ``keys`` as are sound, and load them.

        ``keys``: see `Located.in_host`. Returns tokens restored. The blocks are found by their keys at once:
        whoever reads them does so in this step or a later one.
        """
        tier = self.transfers.tier
        if tier is None:
            return 0
        slots = self.transfers.checked(keys)
        tokens = self._believed(sequence, keys, list(map(tier.tokens_of, slots)))
        if not tokens:
            return 0
        own = sequence.computed // self.block_tokens
        leased = self._allocate(len(tokens), sequence)
        self._drop(sequence, own)
        blocks = self._named(sequence, keys, leased, tokens)
        pairs = zip(slots, leased, blocks, strict=False)
        self.transfers.load([(slot, block) for slot, block, named in pairs if named == block])
        return self._count_in(sequence, own, keys, blocks, tokens)

    def read_up(self, sequence: Sequence, keys: list[bytes], disk: DiskTier) -> int:
        """Copy as many of ``keys`` as are sound, and blocks available for, to the device, now: no step is in
        flight. Returns tokens brought up.

        ``keys``: see `Located.readable`. Blocks whose bytes a move that waits still reads or writes are passed
        over.
        """
        own = sequence.computed // self.block_tokens
        leased = self._allocate(min(len(keys), self.pool.available), sequence)
        busy = self.transfers.pending()
        blocks = [block for block in leased if block not in busy]
        found = self._believed(sequence, keys, disk.read(keys[: len(blocks)], blocks))
        used = set(blocks[: len(found)])
        self.pool.release([block for block in leased if block not in used], sequence.id, keep=False)
        if not found:
            return 0
        self._drop(sequence, own)
        self.transfers.read_into(used, sequence.tenant)
        named = self._named(sequence, keys, blocks[: len(found)], found)
        return self._count_in(sequence, own, keys, named, found)

    def _believed(self, sequence: Sequence, keys: list[bytes], tokens: list[int]) -> list[int]:
        """Tokens of the records under ``keys``, as far as they are what the keys say: full, or such a tail.

        How long a record is stands beside its bytes, whose hash does not vouch for it. One that says otherwise
        is dropped.
        """
        size, own = self.block_tokens, sequence.computed // self.block_tokens
        full = next((at for at, count in enumerate(tokens) if count != size), len(tokens))
        if sequence.keys[own : own + full] != keys[:full]:
            full -= 1  # the last of them is a tail, and says that it is none
        elif full < len(tokens) and keys[full] == self._tail_of(sequence, own + full, tokens[full]):
            return tokens[: full + 1]
        if full < len(tokens):
            self.transfers.drop(keys[full])
        return tokens[:full]

    def _tail_of(self, sequence: Sequence, block: int, tokens: int) -> bytes | None:
        """The key of so many tokens of a partial block; None: a partial one cannot hold that many."""
        end = block * self.block_tokens + tokens
        fits = 0 < tokens < self.block_tokens and end <= len(sequence.tokens)
        return self.residency.tail(sequence, end) if fits else None

    def _named(
        self, sequence: Sequence, keys: Items[bytes], leased: list[int], tokens: Items[int]
    ) -> list[int]:
        """The blocks that hold the records brought up into ``leased``: others, where there are some already."""
        full = len(leased) - (tokens[-1] < self.block_tokens)
        return self.pool.join_each(leased[:full], keys[:full], sequence.id) + leased[full:]

    def _count_in(
        self, sequence: Sequence, own: int, keys: Items[bytes], blocks: list[int], tokens: Items[int]
    ) -> int:
        """Records of so many tokens follow the first ``own`` blocks of the sequence's table; returns the tokens
        it gained.
        """
        sequence.table.extend(blocks)
        end = own * self.block_tokens + sum(tokens)
        if sequence.from_disk:
            pairs = zip(keys, tokens, strict=False)
            sequence.disk += sum(count for key, count in pairs if key in sequence.from_disk)
        if tokens[-1] < self.block_tokens:
            sequence.tail = keys[len(tokens) - 1], end
        restored, sequence.computed, sequence.planned = end - sequence.computed, end, end
        sequence.sealed = end // self.block_tokens
        sequence.shared_tail = False
        sequence.high_water = max(sequence.high_water, end)
        sequence.host += restored
        return restored

    def shortfall(self, sequence: Sequence, end: int) -> int:
        """Blocks to lease before ``[planned, end)`` is computed: new ones, and a copy of a shared tail."""
        return max(0, self.blocks_for(end) - len(sequence.table)) + sequence.shared_tail

    def reach(self, sequence: Sequence, blocks: int) -> int:
        """Position up to which ``sequence`` can compute if it leases at most ``blocks``."""
        if blocks < sequence.shared_tail:
            return sequence.planned
        return (len(sequence.table) + blocks - sequence.shared_tail) * self.block_tokens

    def allocate(self, sequence: Sequence, end: int) -> tuple[BlockCopy, ...]:
        """Lease the `shortfall`, which is available; returns the copy of a shared tail, if there is one."""
        short = self.shortfall(sequence, end)
        if not short:
            return ()
        blocks = self._allocate(short, sequence)
        copies: tuple[BlockCopy, ...] = ()
        if sequence.shared_tail:
            target = blocks.pop()
            source = sequence.table.replace(sequence.computed // self.block_tokens, target)
            sequence.shared_tail = False
            self._sources.append((source, sequence.id))
            copies = (BlockCopy(source, target),)
        sequence.table.extend(blocks)
        return copies

    def launched(self, step: int) -> None:
        """The step goes out. Sources of its copies are let go only now, so that its fence holds them."""
        self.pool.launched(step)
        for source, owner in self._sources:
            self.pool.release([source], owner)
        self._sources.clear()

    # --- keeping ----------------------------------------------------------------------------------------

    def seal(self, sequence: Sequence) -> None:
        """Name the blocks that became full of *computed* KV, so that others find them.

        Of two blocks with one key the first is kept: a sequence that computed the same beside it changes over.
        """
        full = sequence.computed // self.block_tokens
        if full <= sequence.sealed:
            return
        self.residency.name(sequence, full)
        for index in range(sequence.sealed, full):
            block = sequence.table[index]
            kept = self.pool.join(block, sequence.keys[index], sequence.id)
            if kept != block:
                sequence.table.replace(index, kept)
            self.transfers.save(sequence.keys[index], kept, tenant=sequence.tenant)
        sequence.sealed = full

    def save_tail(self, sequence: Sequence) -> None:
        """Have the partial last block kept below, in place of the one that was kept before it."""
        full, part = divmod(sequence.computed, self.block_tokens)
        if not part or self.transfers.tier is None:
            return
        key = self.residency.tail(sequence, sequence.computed)
        if sequence.tail is not None and sequence.tail[0] != key:
            self.transfers.drop(sequence.tail[0])
        self.transfers.save(key, sequence.table[full], part, sequence.tenant)
        sequence.tail = key, sequence.computed

    def offload_tail(self, sequence: Sequence) -> None:
        """A turn is over: its tail is kept below, and was used now. Full blocks are when the device gives them
        up, or before, where there is room.
        """
        if self.transfers.tier is not None:
            self.save_tail(sequence)
            self.transfers.touch([sequence.tail[0]] if sequence.tail else [])

    def lower(self, sequence: Sequence) -> None:
        """Full blocks that the host tier does not have go there: those, too, that came past it from disk."""
        for key, block in zip(sequence.keys, sequence.table.view[: sequence.sealed].tolist(), strict=False):
            self.transfers.save(key, block, tenant=sequence.tenant)

    def fork(self, parent: Sequence, children: Items[Sequence]) -> None:
        """Share with ``children``, whose tokens begin the parent's and are equally many, the committed KV of
        those tokens. Tables are copied as arrays, tokens and keys shared; blocks are counted all at once.
        """
        length = len(children[0].tokens) if children else 0
        computed = min(parent.computed, length)
        held = parent.table.view[: self.blocks_for(computed)]
        self.pool.share(held, *(child.id for child in children))
        for child in children:
            child.computed = child.planned = computed
            child.high_water = min(parent.high_water, length)
            child.table = parent.table.copy(len(held))
            child.keys = parent.keys.copy(length // self.block_tokens)
            child.sealed = min(parent.sealed, computed // self.block_tokens)
            child.shared_tail = computed % self.block_tokens != 0

    # --- giving back ------------------------------------------------------------------------------------

    def trim(self, sequence: Sequence) -> None:
        """Give back blocks beyond what is planned."""
        self._drop(sequence, self.blocks_for(sequence.planned))

    def cut(self, sequence: Sequence, length: int) -> None:
        """Keep KV of the first ``length`` tokens at most; steps in flight beyond them are recalled.

        A last block that stays in part is copied before it is written, if it is sealed or
        another sequence's too.
        """
        if length < sequence.planned:
            sequence.recall()
        if length >= sequence.computed:
            return self.trim(sequence)
        sequence.computed = sequence.planned = length
        tail, partial = divmod(length, self.block_tokens)
        moved = len(sequence.table) > tail + 1
        self.trim(sequence)
        if not partial:
            sequence.shared_tail = False
        elif tail < sequence.sealed or self.pool.references(sequence.table[tail]) > 1:
            sequence.shared_tail = True
        elif moved:
            sequence.shared_tail = False
        sequence.sealed = min(sequence.sealed, tail)
        return None

    def forget(self, sequence: Sequence, length: int) -> None:
        """Drop the tokens from ``length`` on, and all that hung on them."""
        self.cut(sequence, length)
        sequence.tokens.truncate(length)
        sequence.keys.truncate(length // self.block_tokens)
        sequence.high_water = min(sequence.high_water, length)

    def distrust(self, sequence: Sequence, blocks: list[int]) -> bool:
        """Drop all from the first of ``blocks`` on, whose content nobody knows; whether it had one."""
        places = np.nonzero(np.isin(sequence.table.view, blocks))[0]
        if not len(places):
            return False
        self.cut(sequence, min(sequence.computed, int(places[0]) * self.block_tokens))
        sequence.needs_lookup = True
        return True

    def drop_tail(self, sequence: Sequence) -> None:
        """Give up the partial last block: it will be computed again instead of copied."""
        self.cut(sequence, sequence.computed // self.block_tokens * self.block_tokens)

    def surrender(self, sequence: Sequence, kept: int = 0, *, keep: bool = True) -> int:
        """Give all blocks but the first ``kept`` back; returns how many.

        With ``keep`` sealed ones stay findable, and the tail too. Without it nobody finds those that nobody
        else holds, on any tier.
        """
        sequence.recall()
        held = len(sequence.table)
        if keep:
            self.save_tail(sequence)
        if kept:
            self.cut(sequence, kept * self.block_tokens)
            sequence.needs_lookup = True
            return held - len(sequence.table)
        self._drop(sequence, 0, keep=keep)
        if not keep:
            self._drop_below(sequence)
        if sequence.turn is None or sequence.turn.resident is None:
            sequence.host = sequence.disk = 0
        sequence.computed = sequence.planned = sequence.sealed = 0
        sequence.shared_tail = False
        sequence.needs_lookup = True
        return held

    def retire(self, sequence: Sequence) -> None:
        """Nobody is likely to want it again: what nobody else holds gives way first, here and below."""
        blocks = {key: self.pool.index.block_of(key) for key in sequence.keys}
        self.pool.evict_first(block for block in blocks.values() if block is not None)
        held = {key for key, block in blocks.items() if block is not None and self.pool.references(block)}
        self.transfers.retire([key for key in sequence.names() if key not in held])

    def held(self, sequences: Iterable[Sequence]) -> dict[int, int]:
        """References by block that ``sequences`` account for, as the pool's audit wants them."""
        counts: dict[int, int] = {}
        for sequence in sequences:
            for block in sequence.table.to_list():
                counts[block] = counts.get(block, 0) + 1
        return counts

    def _allocate(self, count: int, sequence: Sequence) -> list[int]:
        """Blocks of the pool; what was evicted for them is saved below by the plan that is being made."""
        blocks, evicted = self.pool.allocate(count, sequence.id)
        for block, key, wanted in evicted:
            self.transfers.evicted(block, key, wanted)
        return blocks

    def _drop(self, sequence: Sequence, kept: int, *, keep: bool = True) -> None:
        if kept < len(sequence.table):
            self.pool.release(sequence.table.truncate(kept), sequence.id, keep=keep)

    def _drop_below(self, sequence: Sequence) -> None:
        for key in sequence.keys[:] if self.transfers.tier is not None else ():
            if self.pool.index.block_of(key) is None:
                self.transfers.drop(key)
        if sequence.tail is not None:
            self.transfers.drop(sequence.tail[0])
