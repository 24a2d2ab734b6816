"""Which tier each block of a sequence lies in, and which blocks other sequences hold too. Moves nothing."""

from __future__ import annotations

from itertools import groupby

from ..sequence import Sequence
from ..verbs import BlockMap, KVTier, TierRun
from .block_manager import BlockManager
from .residency import DEVICE, DISK, HOST

_TIERS = {DEVICE: KVTier.DEVICE, HOST: KVTier.HOST, DISK: KVTier.DISK, 0: KVTier.NONE}


def map_blocks(sequence: Sequence, block_manager: BlockManager) -> BlockMap:
    """The tier of each block of all tokens of ``sequence``, and whether other sequences hold it on the device
    too. O(blocks)."""
    places = block_manager.residency.places(sequence)
    runs = [
        TierRun(_TIERS[place], shared, sum(1 for _ in blocks))
        for (place, shared), blocks in groupby(zip(places, _shared(sequence, block_manager), strict=False))
    ]
    return BlockMap(len(sequence.tokens), block_manager.block_tokens, runs)


def _shared(sequence: Sequence, block_manager: BlockManager) -> list[bool]:
    """For each block whether others hold it, in the order of the tokens; more than there are blocks."""
    pool, own = block_manager.pool, sequence.table.view.tolist()
    found = (pool.index.block_of(key) for key in sequence.keys[len(own) :])
    behind = [block is not None and pool.references(block) > 0 for block in found]
    return [pool.references(block) > 1 for block in own] + behind + [False]
