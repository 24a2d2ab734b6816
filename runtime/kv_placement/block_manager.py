"""The blocks of sequences: the only module where sequences and the pool meet.

Finds cached prefixes, allocates blocks to write, copies a shared tail before it is written, names full blocks
and releases blocks; has blocks saved to the host tier and loaded from it. Which sequence gets blocks is
decided by `preemption`, what is computed by `planner`.

A KV group with a window needs a sequence's last blocks only. `give_back` releases the others: those behind the
window of the computed tokens; while a turn runs, those behind the window of its first generated token, since an
interrupt may cut the reply anywhere. Released blocks stay in the prefix cache, and are evicted first. Those in
the window of a *mark* are evicted in the usual order, and saved to the host tier. A mark is a turn's end, or
the end of a prefix that several sequences have. So a fork from a mark and a rewind to it find their blocks.
From another position KV may have to be computed again (`fall_back`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from itertools import takewhile

import numpy as np

from ...kvstore.block_table import NO_BLOCK
from ...kvstore.groups import Windows
from ...kvstore.keys import BlockHasher, in_group
from ...kvstore.pool import BlockPool
from ..plan import BlockCopy
from ..sequence import Sequence
from ..stats import Counters
from .residency import Located, Residency
from .transfers import Transfers


class BlockManager:
    """Gives sequences their blocks: allocates, shares and releases blocks of ``pool``.

    Keys are made by ``hasher`` under ``namespace``; ``transfers`` saves blocks to the host tier and loads
    them. ``counters``: count the tokens found and restored. ``windows``: of the KV groups.
    """

    def __init__(
        self,
        pool: BlockPool,
        hasher: BlockHasher,
        namespace: bytes,
        transfers: Transfers,
        counters: Counters,
        windows: Windows,
    ) -> None:
        self.pool = pool
        self._counters = counters
        self.transfers = transfers
        self.block_tokens = hasher.block_tokens
        self.tiers = transfers.tiers
        self.windows = windows
        self.groups, self._narrow = len(windows), windows.narrow
        self.residency = Residency(pool, hasher, namespace, transfers.tiers, windows)
        self._sources: list[tuple[int, int]] = []  # of copies in the step being planned: block, owner
        self._erasing: list[Iterator[list[bytes]]] = []  # keys of records of sequences that were erased

    def blocks_for(self, tokens: int) -> int:
        """How many blocks of one KV group ``tokens`` tokens take up."""
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
        found, before = self._marked(sequence, self.residency.cached(sequence)), sequence.computed
        if not found.keys or found.end < before:
            return 0
        blocks = [self.pool.index.here[key] for key in found.keys]
        front = sequence.table.view[: before // self.block_tokens].reshape(-1)
        self.pool.share(blocks, sequence.id, behind=front[front != NO_BLOCK])
        self._enter(sequence, found, blocks)
        self._counters.adopted += sequence.computed - before
        return sequence.computed - before

    def locate(self, sequence: Sequence) -> Located:
        """As `Residency.locate`, for a sequence that takes what is found. What others have, too, is marked."""
        return self._marked(sequence, self.residency.locate(sequence))

    def _marked(self, sequence: Sequence, found: Located) -> Located:
        if self._narrow and found.shared > sequence.computed:
            sequence.mark(found.shared)
        return found

    def restore(self, sequence: Sequence, found: Located) -> None:
        """Have records loaded from the host tier to the device, as many of ``found`` as are sound: allocate
        blocks for them, put these into the sequence's table, and leave the copies to the next plan. Blocks that
        are on the device are shared.

        ``found``: see `Located.at_hand`. That many blocks must be available. The prefix cache finds the blocks
        by their keys already when this returns, since they are read in the same step or a later one.
        """
        host, here = self.tiers.host, self.pool.index.here
        lacking = [key for key in found.keys if key not in here]
        slots = dict(zip(lacking, host.find(lacking), strict=False))
        there = takewhile(lambda key: key in here or key in slots, found.keys)
        pairs = zip(there, found.tokens, strict=False)
        tokens = [host.tokens_of(slots[key]) if key in slots else count for key, count in pairs]
        found = self._checked(found, tokens)
        blocks = [here.get(key, NO_BLOCK) for key in found.keys]
        self.pool.share([block for block in blocks if block != NO_BLOCK], sequence.id)
        loaded = [at for at, block in enumerate(blocks) if block == NO_BLOCK]
        for at, block in zip(loaded, self._allocate(len(loaded), sequence.id), strict=True):
            blocks[at] = block
        self.transfers.load({found.keys[at]: blocks[at] for at in loaded})
        self._take_over(sequence, found, blocks, loaded)

    def read_up(self, sequence: Sequence, found: Located) -> int:
        """Read records of the tiers to the device now, without slots, as many of ``found`` as are sound and
        find blocks, and put the blocks into the sequence's table. No step may be in flight. Returns how many
        came.

        ``found``: see `Located.readable`. Blocks that a waiting move reads or writes are not used.
        """
        allocated = self._allocate(min(len(found), self.pool.available), sequence.id)
        busy = self.transfers.pending()
        blocks = [block for block in allocated if block not in busy]
        found = self._checked(found, self.tiers.read(found.keys, blocks))
        blocks = blocks[: len(found)]
        self.pool.release([*set(allocated).difference(blocks)], sequence.id, keep=False)
        self._take_over(sequence, found, blocks, range(len(found)))
        return len(found)

    def _checked(self, found: Located, tokens: list[int]) -> Located:
        """The leading ones of ``found`` that have as many tokens as their places say. ``tokens``: the number
        that stands beside each record.

        That number is not covered by the hash of the record's bytes. A record with a wrong number is dropped.
        """
        pairs = enumerate(zip(tokens, found.tokens, strict=False))
        wrong = next((at for at, (count, wanted) in pairs if count != wanted), None)
        if wrong is not None:
            self.transfers.drop(found.keys[wrong])
        return found.beginning(len(tokens) if wrong is None else wrong)

    def _take_over(self, sequence: Sequence, found: Located, blocks: list[int], fresh: Items[int]) -> None:
        """Put ``blocks``, which hold what was ``found``, into the sequence's table, and count them. Those with
        the numbers ``fresh`` are named by their keys, but partial last ones; the others have keys."""
        if not found.keys:
            return
        tokens = found.tokens
        full = [at for at in fresh if tokens[at] == self.block_tokens]
        self.pool.seal([blocks[at] for at in full], [found.keys[at] for at in full])
        self.transfers.holds((blocks[at] for at in fresh), sequence.tenant)
        before, from_disk = sequence.computed, sequence.from_tiers.from_disk
        self._enter(sequence, found, blocks)
        restored, disk = sequence.computed - before, 0
        if from_disk and restored:
            all_blocks = zip(found.indexes, found.keys, tokens, strict=True)
            came = {index: count for index, key, count in all_blocks if key in from_disk}
            disk = restored if from_disk.issuperset(found.keys) else min(restored, sum(came.values()))
        if tokens[-1] < self.block_tokens:
            sequence.tail = found.keys[-self.groups], found.end
        self._counters.restored += restored
        sequence.from_tiers.host += restored
        sequence.from_tiers.disk += disk

    def _enter(self, sequence: Sequence, found: Located, blocks: list[int]) -> None:
        """Put ``blocks``, which hold what was ``found``, into the sequence's table."""
        own = sequence.computed // self.block_tokens
        if found.indexes[-1] >= own:
            self._drop(sequence, own)  # a partial last one
        sequence.table.put(found.indexes, found.groups, blocks)
        if found.end > sequence.computed:
            sequence.found(found.end, sealed=found.end // self.block_tokens)

    # --- windows ----------------------------------------------------------------------------------------

    def fall_back(self, sequence: Sequence, *, wait: bool = False) -> None:
        """If blocks that the sequence's next token sees are gone, keep the longest beginning that can go on:
        with what is on the device, and with ``wait`` on the tiers."""
        if not self._narrow or sequence.planned != sequence.computed or self.residency.is_whole(sequence):
            return
        ends = [self.residency.cached(sequence).end]
        if wait:
            ends.append(self.residency.locate(sequence).end)
        if max(ends) < sequence.computed:
            came = sequence.from_tiers
            restored = min(came.host, sequence.computed - max(ends))
            came.host, came.disk = came.host - restored, min(came.disk, came.host - restored)
            sequence.count_found(max(ends) + restored - sequence.computed)
            self.cut(sequence, max(ends))
        if not wait:
            self.adopt(sequence)
        else:
            sequence.look_up()

    def give_back(self, sequence: Sequence) -> None:
        """Release the blocks behind the windows that the sequence does not need any more."""
        if not self._narrow:
            return
        turn, marks = sequence.turn, sequence.marks
        start = sequence.computed if turn is None else min(sequence.computed, turn.output_from)
        start -= start % self.block_tokens  # a partial last block may be lost
        for group in self._narrow:
            indexes, blocks = sequence.table.give_back(group, self.windows.first(group, start))
            if not len(blocks):
                continue
            seen = np.zeros(len(blocks), dtype=bool)
            for mark in marks[bisect_left(marks, int(indexes[0]) * self.block_tokens) :]:
                first = self.windows.first(group, mark // self.block_tokens * self.block_tokens)
                if first > indexes[-1]:
                    break
                seen |= (indexes >= first) & (indexes * self.block_tokens < mark)
            self.pool.release(blocks[seen], sequence.id)
            self.pool.release(blocks[~seen], sequence.id, wanted=False)

    def shortfall(self, sequence: Sequence, end: int) -> int:
        """How many blocks must be allocated before the positions ``[planned, end)`` are computed: new ones,
        and one of each KV group for the copy of a partial last block that is shared."""
        return (max(0, self.blocks_for(end) - len(sequence.table)) + sequence.shared_tail) * self.groups

    def reach(self, sequence: Sequence, blocks: int) -> int:
        """The position up to which ``sequence`` can compute if it gets ``blocks`` more blocks."""
        blocks //= self.groups
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
        copies: list[BlockCopy] = []
        for group in range(self.groups if sequence.shared_tail else 0):
            target = blocks.pop()
            source = sequence.table.replace(sequence.computed // self.block_tokens, target, group)
            self._sources.append((source, sequence.id))
            copies.append(BlockCopy(source, target))
        sequence.share_tail(False)
        sequence.table.extend(blocks)
        return tuple(copies)

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
        view = sequence.table.view
        for index in range(sequence.sealed, full):
            for group in range(self.groups):
                block, key = int(view[index, group]), in_group(sequence.keys[index], group)
                kept = self.pool.join(block, key, sequence.id)
                if kept != block:
                    sequence.table.replace(index, kept, group)
                if group in self._narrow:
                    self.transfers.holds((kept,), sequence.tenant)
                else:
                    self.transfers.save(key, kept, tenant=sequence.tenant)
        sequence.seal(full)
        self.give_back(sequence)

    def save_tail(self, sequence: Sequence) -> None:
        """Have the partial last block saved to the host tier, or count its record there as used now. Drop the
        record of it that was saved before. Does nothing if the last block is full: full blocks are saved when
        the pool evicts them, or before, where there is room."""
        full, part = divmod(sequence.computed, self.block_tokens)
        if not part or not self.tiers.slots:
            return
        key = self.residency.tail(sequence, sequence.computed)
        before, end = sequence.tail or (key, 0)
        stale = before != key and end not in sequence.marks
        for group, block in enumerate(sequence.table.view[full].tolist()):
            if stale:
                self.transfers.drop(in_group(before, group))
            self.transfers.save(in_group(key, group), block, part, sequence.tenant)
        self.tiers.host.touch(in_group(key, group) for group in range(self.groups))
        sequence.tail = key, sequence.computed

    def rest(self, sequence: Sequence) -> None:
        """Note that a turn of the sequence has ended: mark its end, give back what lies behind the windows
        there, and have what the next token sees saved."""
        if self._narrow:
            sequence.mark(sequence.computed)
            self.give_back(sequence)
            self._save_blocks(sequence, self._narrow)

    def lower(self, sequence: Sequence) -> None:
        """Have all full blocks that the host tier does not have saved there."""
        self._save_blocks(sequence, range(self.groups))

    def _save_blocks(self, sequence: Sequence, groups: Iterable[int]) -> None:
        for group in groups:
            column = sequence.table.view[: sequence.sealed, group]
            for index in np.flatnonzero(column != NO_BLOCK).tolist():
                key = in_group(sequence.keys[index], group)
                self.transfers.save(key, int(column[index]), tenant=sequence.tenant)

    def fork(self, parent: Sequence, children: Items[Sequence]) -> None:
        """Share the parent's committed KV with ``children``, as far as their tokens go; all of these have the
        same first tokens of the parent.

        Tables are copied as arrays; tokens and keys are shared.
        """
        length = len(children[0].tokens) if children else 0
        computed = min(parent.computed, length)
        blocks = self.blocks_for(computed)
        for child in children:
            child.inherit(parent, computed, self.block_tokens)
            child.table = parent.table.copy(blocks)
        if children:
            self.pool.share(children[0].table.held, *(child.id for child in children))
        for child in children if self._narrow else ():
            self._complete_tail(child, parent.keys)

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
        elif tail < sequence.sealed or any(
            self.pool.references.of(block) > 1 for block in sequence.table.view[tail].tolist()
        ):
            sequence.share_tail(True)
        elif moved:
            sequence.share_tail(False)
        sequence.seal(min(sequence.sealed, tail))
        return self._complete_tail(sequence, sequence.keys)

    def _complete_tail(self, sequence: Sequence, keys: Items[bytes]) -> None:
        """If groups with a window have given the partial last block back, take the full one that it was; if
        that is gone, drop the block's KV. ``keys``: of all that the block was of. Have blocks that the next
        token sees looked up, too."""
        tail, partial = divmod(sequence.computed, self.block_tokens)
        narrow = self._narrow if partial else ()
        lacks = [group for group in narrow if sequence.table.view[tail, group] == NO_BLOCK]
        if lacks:
            named = [in_group(keys[tail], group) for group in lacks] if len(keys) > tail else []
            blocks = [self.pool.index.here.get(key) for key in named]
            found = [block for block in blocks if block is not None]
            if not found or len(found) < len(blocks):
                sequence.fall_back(tail * self.block_tokens)
                sequence.share_tail(False)
                self.trim(sequence)
            else:
                self.pool.share(found, sequence.id)
                sequence.table.put([tail] * len(lacks), lacks, found)
                sequence.share_tail(True)
        if self._narrow and not self.residency.is_whole(sequence):
            sequence.look_up()

    def forget(self, sequence: Sequence, length: int) -> None:
        """Remove the sequence's tokens from ``length`` on, with their KV and keys."""
        for mark in sequence.marks:
            if mark > length and mark % self.block_tokens:
                key = self.residency.tail(sequence, mark)
                for group in range(self.groups):
                    self.transfers.drop(in_group(key, group))
        self.cut(sequence, length)
        sequence.forget(length, length // self.block_tokens)

    def distrust(self, sequence: Sequence, blocks: list[int]) -> bool:
        """If the sequence has one of ``blocks``, which have unknown content, drop its KV from the first of
        these on, to be computed again. Returns whether it had one."""
        indexes = np.flatnonzero(np.isin(sequence.table.view, blocks).any(axis=1))
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
        held = sequence.table.blocks
        if keep:
            self.save_tail(sequence)
        if kept:
            self.cut(sequence, kept * self.block_tokens)
            sequence.look_up()
            return held - sequence.table.blocks
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
        names = self.residency.names(sequence)
        blocks = {key: self.pool.index.here.get(key) for key in names}
        self.pool.evict_first(block for block in blocks.values() if block is not None)
        held = {key for key, block in blocks.items() if block is not None and self.pool.references.of(block)}
        self.tiers.retire([key for key in names if key not in held])

    def count_held(self, sequences: Iterable[Sequence]) -> int:
        """How many blocks the tables of ``sequences`` hold, each counted once. O(their blocks), in arrays."""
        tables = [sequence.table.held for sequence in sequences]
        return len(np.unique(np.concatenate(tables))) if tables else 0

    def allocate_each(self, sequences: Items[Sequence]) -> None:
        """Allocate one more block of each KV group for each sequence; as many must be available."""
        each = self.groups
        blocks = self._allocate(
            len(sequences) * each, *[sequence.id for sequence in sequences for _ in range(each)]
        )
        for at, sequence in enumerate(sequences):
            sequence.table.extend(blocks[at * each : (at + 1) * each])

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

    @property
    def erasing(self) -> bool:
        """Whether `erase_on` has something to do."""
        return bool(self._erasing)

    def erase_on(self) -> None:
        """Look at some more positions of sequences that were erased, and drop the records there: few at a time,
        so that the next step is not late."""
        if self._erasing:
            keys = next(self._erasing[0], None)
            if keys is None:
                del self._erasing[0]
            for key in keys or ():
                self.transfers.drop(key, erase=True)

    def _drop_everywhere(self, sequence: Sequence) -> None:
        """Drop the KV of the sequence's tokens that no other sequence holds, on all tiers: of all its blocks,
        also those that it does not hold now, and of every partial last block that may have been saved. Where
        groups have windows, those of earlier turns' ends are dropped by `erase_on`."""
        if self._narrow:
            self._erasing.append(self.residency.earlier_tails(sequence))
        for key in self.residency.everything(sequence):
            block = self.pool.index.here.get(key)
            if block is not None and self.pool.references.of(block):
                continue
            if block is not None:
                self.pool.distrust([block])
            self.transfers.drop(key, erase=True)
