"""The blocks of sequences: the only module where sequences and the pool meet.

Finds cached prefixes, allocates blocks to write, copies a shared tail before it is written, names full blocks
and releases blocks; has blocks saved to the host tier and loaded from it. Which sequence gets blocks is
decided by `preemption`, what is computed by `planner`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np

from ...kvstore.keys import BlockHasher
from ...kvstore.pool import BlockPool
from ..plan import BlockCopy
from ..sequence import Sequence
from ..stats import Counters
from .residency import Residency
from .transfers import Transfers


class BlockManager:
    """Gives sequences their blocks: allocates, shares and releases blocks of ``pool``.

    Keys are made by ``hasher`` under ``namespace``; ``transfers`` saves blocks to the host tier and loads
    them. ``counters``: count the tokens found and restored.
    """

    def __init__(
        self,
        pool: BlockPool,
        hasher: BlockHasher,
        namespace: bytes,
        transfers: Transfers,
        counters: Counters,
    ) -> None:
        self.pool = pool
        self._counters = counters
        self.transfers = transfers
        self.block_tokens = hasher.block_tokens
        self.tiers = transfers.tiers
        self.residency = Residency(pool, hasher, namespace, transfers.tiers)
        self._sources: list[tuple[int, int]] = []  # of copies in the step being planned: block, owner

    def blocks_for(self, tokens: int) -> int:
        """How many blocks ``tokens`` tokens take up."""
        return -(-tokens // self.block_tokens)

    # --- taking -----------------------------------------------------------------------------------------

    def adopt(self, sequence: Sequence) -> int:
        """Look in the prefix cache for the blocks behind the computed tokens, and put those that are found
        into the sequence's table. Returns the tokens that it gained.

        The last token is never taken from the cache, since its logits are wanted. Nothing is for a turn that
        wants log probabilities of its prompt: only computing gives them.
        """
        if sequence.planned != sequence.computed or (sequence.turn is not None and sequence.turn.to_score):
            return 0
        own, most = sequence.computed // self.block_tokens, (len(sequence.tokens) - 1) // self.block_tokens
        if most <= own:
            return 0
        self.residency.name(sequence, most)
        blocks = self.pool.index.match(sequence.keys[own:most])
        if not blocks:
            return 0
        self.pool.share(blocks, sequence.id, behind=sequence.table.view[:own])
        self._drop(sequence, own)
        sequence.table.extend(blocks)
        before = sequence.computed
        sequence.found((own + len(blocks)) * self.block_tokens, sealed=len(sequence.table))
        self._counters.adopted += sequence.computed - before
        return sequence.computed - before

    def restore(self, sequence: Sequence, keys: list[bytes]) -> int:
        """Have records loaded from the host tier to the device, as many of ``keys`` as are sound: allocate
        blocks for them, append these to the sequence's table, and leave the copies to the next plan. Returns
        the tokens restored.

        ``keys``: of the records behind the computed tokens, see `Located.in_host`. That many blocks must be
        available. The prefix cache finds the blocks by their keys already when this returns, since they are
        read in the same step or a later one.
        """
        host = self.tiers.host
        found = [] if host is None else [host.tokens_of(slot) for slot in host.find(keys)]
        tokens = self._checked(sequence, keys, found)
        if not tokens:
            return 0
        own = sequence.computed // self.block_tokens
        allocated = self._allocate(len(tokens), sequence.id)
        self._drop(sequence, own)
        blocks = self._named(sequence, keys, allocated, tokens)
        fresh = [at for at, block in enumerate(allocated) if blocks[at] == block]
        self.transfers.load([keys[at] for at in fresh], [allocated[at] for at in fresh])
        return self._count_in(sequence, own, keys, blocks, tokens)

    def delays(self, sequence: Sequence) -> bool:
        """Whether a row of the sequence would keep others waiting, as its blocks are still being loaded."""
        return self.transfers.delays(sequence.table.view)

    def read_up(self, sequence: Sequence, keys: list[bytes]) -> int:
        """Read records of the tiers to the device now, without slots, as many of ``keys`` as are sound and find
        blocks, and append the blocks to the sequence's table. No step may be in flight.
        Returns the tokens restored.

        ``keys``: of the records behind the computed tokens, see `Located.readable`. Blocks that a waiting
        move reads or writes are not used.
        """
        own = sequence.computed // self.block_tokens
        allocated = self._allocate(min(len(keys), self.pool.available), sequence.id)
        busy = self.transfers.pending()
        blocks = [block for block in allocated if block not in busy]
        found = self._checked(sequence, keys, self.tiers.read(keys, blocks))
        used = set(blocks[: len(found)])
        self.pool.release([block for block in allocated if block not in used], sequence.id, keep=False)
        if not found:
            return 0
        self._drop(sequence, own)
        self.transfers.read_into(used, sequence.tenant)
        named = self._named(sequence, keys, blocks[: len(found)], found)
        return self._count_in(sequence, own, keys, named, found)

    def _checked(self, sequence: Sequence, keys: list[bytes], tokens: list[int]) -> list[int]:
        """The numbers of tokens of the leading records that are what their ``keys`` say: full blocks, then
        perhaps a partial one. ``tokens``: the number that stands beside each record.

        That number is not covered by the hash of the record's bytes. A record with a wrong number is dropped.
        """
        size, own = self.block_tokens, sequence.computed // self.block_tokens
        full = next((at for at, count in enumerate(tokens) if count != size), len(tokens))
        if sequence.keys[own : own + full] != keys[:full]:
            full -= 1  # the last one is a tail with a full block's number of tokens
        elif full < len(tokens) and keys[full] == self._tail_of(sequence, own + full, tokens[full]):
            return tokens[: full + 1]
        if full < len(tokens):
            self.transfers.drop(keys[full])
        return tokens[:full]

    def _tail_of(self, sequence: Sequence, block: int, tokens: int) -> bytes | None:
        """The key that the sequence's partial block number ``block`` has if it holds ``tokens`` tokens; None:
        it cannot hold that many."""
        end = block * self.block_tokens + tokens
        fits = 0 < tokens < self.block_tokens and end <= len(sequence.tokens)
        return self.residency.tail(sequence, end) if fits else None

    def _named(
        self, sequence: Sequence, keys: Items[bytes], allocated: list[int], tokens: Items[int]
    ) -> list[int]:
        """Name the restored blocks ``allocated`` by ``keys``, but a partial last one. Returns the blocks for
        the table: where a key names another block already, that one, and the restored one is released.
        ``tokens``: in each block."""
        full = len(allocated) - (tokens[-1] < self.block_tokens)
        return self.pool.join_each(allocated[:full], keys[:full], sequence.id) + allocated[full:]

    def _count_in(
        self, sequence: Sequence, own: int, keys: Items[bytes], blocks: list[int], tokens: Items[int]
    ) -> int:
        """Append restored ``blocks`` to the sequence's table, behind its first ``own``, and count them.
        ``keys``, ``tokens``: of each. Returns the tokens that the sequence gained."""
        sequence.table.extend(blocks)
        end = own * self.block_tokens + sum(tokens)
        from_disk, disk = sequence.from_tiers.from_disk, 0
        if from_disk:
            disk = sum(count for key, count in zip(keys, tokens, strict=False) if key in from_disk)
        if tokens[-1] < self.block_tokens:
            sequence.tail = keys[len(tokens) - 1], end
        restored = end - sequence.computed
        sequence.found(end, sealed=end // self.block_tokens)
        self._counters.restored += restored
        sequence.from_tiers.host += restored
        sequence.from_tiers.disk += disk
        return restored

    def shortfall(self, sequence: Sequence, end: int) -> int:
        """How many blocks must be allocated before the positions ``[planned, end)`` are computed: new ones,
        and one for the copy of a partial last block that is shared."""
        return max(0, self.blocks_for(end) - len(sequence.table)) + sequence.shared_tail

    def reach(self, sequence: Sequence, blocks: int) -> int:
        """The position up to which ``sequence`` can compute if it gets ``blocks`` more blocks."""
        if blocks < sequence.shared_tail:
            return sequence.planned
        return (len(sequence.table) + blocks - sequence.shared_tail) * self.block_tokens

    def allocate(self, sequence: Sequence, end: int) -> tuple[BlockCopy, ...]:
        """Allocate the blocks that the sequence needs to compute up to ``end`` (`shortfall`), which must be
        available. Returns the copy of a partial last block that is shared, for the plan; else nothing."""
        short = self.shortfall(sequence, end)
        if not short:
            return ()
        blocks = self._allocate(short, sequence.id)
        copies: tuple[BlockCopy, ...] = ()
        if sequence.shared_tail:
            target = blocks.pop()
            source = sequence.table.replace(sequence.computed // self.block_tokens, target)
            sequence.share_tail(False)
            self._sources.append((source, sequence.id))
            copies = (BlockCopy(source, target),)
        sequence.table.extend(blocks)
        return copies

    def launched(self, step: int) -> None:
        """Note that the step being planned is launched: raise the pool's fence for it, and only then release
        the source blocks of its copies."""
        self.pool.launched(step)
        for source, owner in self._sources:
            self.pool.release([source], owner)
        self._sources.clear()

    # --- keeping ----------------------------------------------------------------------------------------

    def seal(self, sequence: Sequence) -> None:
        """Name the blocks that became full of computed KV, so that the prefix cache finds them, and have them
        saved to the host tier.

        Where a key names another block already, the sequence takes that one.
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
        sequence.seal(full)

    def save_tail(self, sequence: Sequence) -> None:
        """Have the partial last block saved to the host tier, and drop the record of it that was saved
        before. Does nothing if the last block is full."""
        full, part = divmod(sequence.computed, self.block_tokens)
        if not part or self.tiers.host is None:
            return
        key = self.residency.tail(sequence, sequence.computed)
        if sequence.tail is not None and sequence.tail[0] != key:
            self.transfers.drop(sequence.tail[0])
        self.transfers.save(key, sequence.table[full], part, sequence.tenant)
        sequence.tail = key, sequence.computed

    def offload_tail(self, sequence: Sequence) -> None:
        """Have the partial last block saved to the host tier, and count its record as used now.

        Full blocks are saved when the pool evicts them, or before, where there is room.
        """
        self.save_tail(sequence)
        if self.tiers.host is not None and sequence.tail is not None:
            self.tiers.host.touch((sequence.tail[0],))

    def lower(self, sequence: Sequence) -> None:
        """Have all full blocks that the host tier does not have saved there."""
        for key, block in zip(sequence.keys, sequence.table.view[: sequence.sealed].tolist(), strict=False):
            self.transfers.save(key, block, tenant=sequence.tenant)

    def fork(self, parent: Sequence, children: Items[Sequence]) -> None:
        """Share the parent's committed KV with ``children``, as far as their tokens go; all of these have the
        same first tokens of the parent.

        Tables are copied as arrays; tokens and keys are shared.
        """
        length = len(children[0].tokens) if children else 0
        computed = min(parent.computed, length)
        held = parent.table.view[: self.blocks_for(computed)]
        self.pool.share(held, *(child.id for child in children))
        for child in children:
            child.inherit(parent, computed, self.block_tokens)
            child.table = parent.table.copy(len(held))

    # --- giving back ------------------------------------------------------------------------------------

    def trim(self, sequence: Sequence) -> None:
        """Release the blocks behind the planned tokens."""
        self._drop(sequence, self.blocks_for(sequence.planned))

    def cut(self, sequence: Sequence, length: int) -> None:
        """Keep the KV of the first ``length`` tokens at most, and release the blocks behind it; rows of steps
        in flight beyond them are discarded.

        A last block that stays in part is copied before it is written, if it is sealed or shared.
        """
        if length < sequence.planned:
            sequence.recall()
        if length >= sequence.computed:
            return self.trim(sequence)
        sequence.fall_back(length)
        tail, partial = divmod(length, self.block_tokens)
        moved = len(sequence.table) > tail + 1
        self.trim(sequence)
        if not partial:
            sequence.share_tail(False)
        elif tail < sequence.sealed or self.pool.references(sequence.table[tail]) > 1:
            sequence.share_tail(True)
        elif moved:
            sequence.share_tail(False)
        sequence.seal(min(sequence.sealed, tail))
        return None

    def forget(self, sequence: Sequence, length: int) -> None:
        """Remove the sequence's tokens from ``length`` on, with their KV and keys."""
        self.cut(sequence, length)
        sequence.forget(length, length // self.block_tokens)

    def distrust(self, sequence: Sequence, blocks: list[int]) -> bool:
        """If the sequence has one of ``blocks``, which have unknown content, drop its KV from the first of
        these on, to be computed again. Returns whether it had one."""
        indexes = np.nonzero(np.isin(sequence.table.view, blocks))[0]
        if not len(indexes):
            return False
        self.cut(sequence, min(sequence.computed, int(indexes[0]) * self.block_tokens))
        sequence.look_up()
        return True

    def drop_tail(self, sequence: Sequence) -> None:
        """Drop the KV of the partial last block, to compute it again instead of copying the block."""
        self.cut(sequence, sequence.computed // self.block_tokens * self.block_tokens)

    def surrender(self, sequence: Sequence, kept: int = 0, *, keep: bool = True) -> int:
        """Release all blocks of the sequence but the first ``kept``; returns how many. What is planned is
        taken back.

        With ``keep``, sealed blocks can still be found in the prefix cache, and the partial last block is
        saved to the host tier. Without it, blocks that no other sequence holds are dropped on all tiers.
        """
        sequence.recall()
        held = len(sequence.table)
        if keep:
            self.save_tail(sequence)
        if kept:
            self.cut(sequence, kept * self.block_tokens)
            sequence.look_up()
            return held - len(sequence.table)
        self._drop(sequence, 0, keep=keep)
        if not keep:
            self._drop_everywhere(sequence)
        if sequence.turn is None or sequence.turn.resident is None:
            sequence.from_tiers.host = sequence.from_tiers.disk = 0
        sequence.surrendered()
        return held

    def retire(self, sequence: Sequence) -> None:
        """Let the KV that no other sequence holds be evicted first, on all tiers: the sequence is unlikely to
        come back."""
        blocks = {key: self.pool.index.block_of(key) for key in sequence.keys}
        self.pool.evict_first(block for block in blocks.values() if block is not None)
        held = {key for key, block in blocks.items() if block is not None and self.pool.references(block)}
        self.tiers.retire([key for key in sequence.names() if key not in held])

    def count_held(self, sequences: Iterable[Sequence]) -> int:
        """How many blocks the tables of ``sequences`` hold, each counted once. O(their blocks), in arrays."""
        tables = [sequence.table.view for sequence in sequences]
        return len(np.unique(np.concatenate(tables))) if tables else 0

    def allocate_each(self, sequences: Items[Sequence]) -> None:
        """Allocate one more block for each sequence; as many must be available."""
        blocks = self._allocate(len(sequences), *[sequence.id for sequence in sequences])
        for sequence, block in zip(sequences, blocks, strict=True):
            sequence.table.extend((block,))

    def _allocate(self, count: int, *owners: int) -> list[int]:
        """Allocate ``count`` blocks, which are available, for one sequence or one for each. What the pool
        evicted for them is noted, so that the plan that is being made saves it to the host tier."""
        blocks, evicted = self.pool.allocate(count, *owners)
        for block, key, wanted in evicted:
            self.transfers.evicted(block, key, wanted)
        return blocks

    def _drop(self, sequence: Sequence, kept: int, *, keep: bool = True) -> None:
        if kept < len(sequence.table):
            self.pool.release(sequence.table.truncate(kept), sequence.id, keep=keep)

    def _drop_everywhere(self, sequence: Sequence) -> None:
        """Drop the KV of the sequence's tokens that no other sequence holds, on all tiers: of all its blocks,
        also those that it does not hold now, and of every partial last block that may have been saved."""
        total, size = len(sequence.tokens), self.block_tokens
        self.residency.name(sequence, total // size)
        last = max(0, total - 1) // size * size  # the last token is computed only if others follow
        tails = (self.residency.tail(sequence, end) for end in range(last + 1, total + 1) if end % size)
        for key in [*sequence.names(), *tails]:
            block = self.pool.index.block_of(key)
            if block is not None and self.pool.references(block):
                continue
            if block is not None:
                self.pool.discard(block)
            self.transfers.drop(key, erase=True)
