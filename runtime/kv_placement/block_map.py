"""Which tier each block of a sequence lies in, and which blocks other sequences have too. Moves nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import groupby

from ...kvstore.keys import KeyChain
from ..link.messages import BlockMap, KVTier, TierRun
from ..sequence import Sequence
from .block_manager import BlockManager
from .residency import DEVICE, DISK, HOST

_TIERS = {DEVICE: KVTier.DEVICE, HOST: KVTier.HOST, DISK: KVTier.DISK, 0: KVTier.NONE}


def map_blocks(sequence: Sequence, sequences: Iterable[Sequence], block_manager: BlockManager) -> BlockMap:
    """The tier of each block of all tokens of ``sequence``, and whether other sequences have it too.
    ``sequences``: all that are open. O(blocks + sequences)."""
    places = block_manager.residency.places(sequence)
    shared = _shared_blocks(sequence, sequences)
    flags = [at < shared for at in range(len(places))]
    if places and len(places) == len(sequence.table):  # a fork shares the partial last block, too
        flags[-1] = flags[-1] or block_manager.pool.references(sequence.table[len(places) - 1]) > 1
    runs = [
        TierRun(_TIERS[place], flag, sum(1 for _ in blocks))
        for (place, flag), blocks in groupby(zip(places, flags, strict=True))
    ]
    return BlockMap(len(sequence.tokens), block_manager.block_tokens, runs)


def _shared_blocks(sequence: Sequence, sequences: Iterable[Sequence]) -> int:
    """How many of the sequence's first full blocks another one of ``sequences`` has too: the longest common
    beginning of their keys."""
    own, most = sequence.keys, 0
    for other in sequences:
        keys = other.keys
        if other is not sequence and most < min(len(own), len(keys)) and own[most] == keys[most]:
            most = _common(own, keys)
    return most


def _common(one: KeyChain, other: KeyChain) -> int:
    """The length of the common beginning of two chains of keys, by bisection: equal keys have equal keys
    before them."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda at: one[at] != other[at])
