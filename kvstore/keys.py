"""Block keys: the name under which a full block's KV can be found again.

A chain: ``key(i) = H(key(i-1), tokens of block i)``, and ``key(-1) = H(namespace, salt)``; ``H`` is keyed
BLAKE2b (RFC 7693) of 128 bits. Equal keys mean: same weights and layout, same tenant, same tokens from
position 0 on. Without the secret nobody can aim two prompts at one key. Stable over restarts while the
secret is kept. Knows no block ids, no tensors, no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import GroupInvalid
from .groups import KVGroup

KEY_BYTES = 16
"""Length of every key, in bytes."""

TokenIds: TypeAlias = NDArray[np.int64] | NDArray[np.int32]


class BlockHasher:
    """Makes the keys of one store.

    Args:
        secret: 16 to 64 random bytes, kept in the store beside the records.
        block_tokens: tokens in one block.

    Raises:
        GroupInvalid: the secret's length or the block size is out of bounds.
    """

    def __init__(self, secret: bytes, block_tokens: int) -> None:
        if not 16 <= len(secret) <= 64:
            raise GroupInvalid(f"block hasher: the secret has {len(secret)} bytes, not 16 to 64")
        if block_tokens < 1:
            raise GroupInvalid(f"block hasher: block_tokens = {block_tokens}")
        self.block_tokens = block_tokens
        self._root = hashlib.blake2b(key=secret, digest_size=KEY_BYTES, person=b"holdfast.root")
        self._block = hashlib.blake2b(key=secret, digest_size=KEY_BYTES, person=b"holdfast.block")
        self._tail = hashlib.blake2b(key=secret, digest_size=KEY_BYTES, person=b"holdfast.tail")

    def root(self, namespace: bytes, salt: bytes) -> bytes:
        """The state before the first block, for one `namespace_digest` and one tenant's ``salt``."""
        state = self._root.copy()
        state.update(len(namespace).to_bytes(8, "little") + namespace + salt)
        return state.digest()

    def next(self, parent: bytes, tokens: TokenIds) -> bytes:
        """The key of the block that follows ``parent`` and holds ``tokens``, ``[block_tokens]``."""
        assert len(tokens) == self.block_tokens, "only full blocks have a key"
        return self.chain(parent, tokens)[0]

    def tail(self, parent: bytes, tokens: TokenIds) -> bytes:
        """The key of a partial last block that follows ``parent`` and holds exactly ``tokens``.

        Their number is part of it: a record of more or of fewer tokens has another key.
        """
        assert 0 < len(tokens) < self.block_tokens, "a tail is neither empty nor full"
        state = self._tail.copy()
        state.update(parent + len(tokens).to_bytes(8, "little") + tokens.astype("<i8").tobytes())
        return state.digest()

    def space(self, namespace: bytes) -> bytes:
        """16 bytes that tell records of this ``namespace`` and secret from all others."""
        return self.root(namespace, b"records")

    def chain(self, parent: bytes, tokens: TokenIds) -> list[bytes]:
        """The keys of the *full* blocks of ``tokens``, the first of which follows ``parent``."""
        stride = 8 * self.block_tokens
        full = len(tokens) // self.block_tokens
        data = tokens[: full * self.block_tokens].astype("<i8").tobytes()
        keys: list[bytes] = []
        copy = self._block.copy
        for start in range(0, full * stride, stride):
            state = copy()
            state.update(parent + data[start : start + stride])
            parent = state.digest()
            keys.append(parent)
        return keys


def namespace_digest(
    *,
    weights: bytes,
    config: Mapping[str, Any],
    groups: Sequence[KVGroup],
    rank: int = 0,
    ranks: int = 1,
    adapter: bytes = b"",
    scales: bytes = b"",
) -> bytes:
    """16 bytes for everything but tokens and tenant that decides what a block's bytes mean.

    Args:
        weights: digest of the weights' content.
        config: the model's settings that shape KV, rotary ones included; JSON values.
        groups: all that one block id names blocks of; dtype, layout version, block size and id are in a
            group's ``spec_digest``.
        rank, ranks: which shard of how many.
        adapter: digest of the adapter's content, empty without one.
        scales: digest of the quantisation scales, empty without any.
    """
    parts = {
        "weights": weights.hex(),
        "config": config,
        "groups": [group.spec_digest().hex() for group in groups],
        "shard": [rank, ranks],
        "adapter": adapter.hex(),
        "scales": scales.hex(),
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES, person=b"holdfast.space").digest()
