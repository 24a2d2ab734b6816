"""Block keys: the names by which KV is found again, and the list of a sequence's keys.

A chain: ``key(i) = H(key(i-1), tokens of block i)``, and ``key(-1) = H(namespace, salt)``; ``H`` is keyed
BLAKE2b (RFC 7693) of 128 bits. Equal keys mean: same weights and arithmetic, same tenant, same tokens from
position 0 on. A key is looked up in a record space (`BlockHasher.space`), which decides the layout of what is
found. Without the secret two prompts cannot be aimed at one key. Keys are the same after a restart while the
secret is kept. Knows no block ids, no tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from .groups import KVGroup

KEY_BYTES = 16
"""Length of every key, in bytes."""


def in_group(key: bytes, group: int) -> bytes:
    """The key of a block's KV in the KV group with this number; in group 0 it is ``key``."""
    return key if not group else key[:-1] + bytes((key[-1] ^ group,))


TokenIds: TypeAlias = NDArray[np.int64] | NDArray[np.int32]


class BlockHasher:
    """Makes the keys of the blocks of one store.

    Args:
        secret: 16 to 64 random bytes, kept in the store beside the records.
        block_tokens: tokens in one block.
    """

    def __init__(self, secret: bytes, block_tokens: int) -> None:
        assert 16 <= len(secret) <= 64, f"the secret has {len(secret)} bytes, not 16 to 64"
        self.block_tokens = block_tokens
        self._root = hashlib.blake2b(key=secret, digest_size=KEY_BYTES, person=b"holdfast.root")
        self._block = hashlib.blake2b(key=secret, digest_size=KEY_BYTES, person=b"holdfast.block")
        self._tail = hashlib.blake2b(key=secret, digest_size=KEY_BYTES, person=b"holdfast.tail")

    def root(self, namespace: bytes, salt: bytes) -> bytes:
        """The key that stands before a tenant's first block, 16 bytes, for one ``namespace``
        (`namespace_digest`) and the tenant's ``salt``."""
        state = self._root.copy()
        state.update(len(namespace).to_bytes(8, "little") + namespace + salt)
        return state.digest()

    def tail(self, parent: bytes, tokens: TokenIds) -> bytes:
        """The key of a partial last block that holds exactly ``tokens``, behind the block with the key
        ``parent`` (or the root).

        The number of tokens is hashed too: a record of more or fewer tokens has another key.
        """
        assert 0 < len(tokens) < self.block_tokens, "a tail is neither empty nor full"
        state = self._tail.copy()
        state.update(parent + len(tokens).to_bytes(8, "little") + tokens.astype("<i8").tobytes())
        return state.digest()

    def space(self, namespace: bytes, groups: Iterable[KVGroup]) -> bytes:
        """The record space, 16 bytes that differ for each secret, ``namespace`` and layout of KV (``groups``).
        They name the folder of a store's records and the host tier's memory."""
        return self.root(namespace, b"".join([b"records", *(group.spec_digest() for group in groups)]))

    def chain(self, parent: bytes, tokens: TokenIds) -> list[bytes]:
        """The keys of the *full* blocks of ``tokens``, in order; what is left over has none. The first of
        these blocks follows the block with the key ``parent`` (or the root)."""
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
    adapter: bytes,
    numerics: Mapping[str, Any],
) -> bytes:
    """16 bytes that stand for all that decides what KV means, except tokens and tenant; not how and where it is
    stored.

    Args:
        weights: digest of the weights' content.
        config: the model's settings that shape KV, rotary ones included; JSON values.
        adapter: digest of the adapter's content, empty without one.
        numerics: the arithmetic that computes: kernels and their version, computing type, forms of the weights;
            JSON values.
    """
    parts = {
        "weights": weights.hex(),
        "config": config,
        "adapter": adapter.hex(),
        "numerics": numerics,
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES, person=b"holdfast.space").digest()


class KeyChain(Sequence[bytes]):
    """The block keys of one sequence, in the order of its blocks; reads as a list, changes at its end only.

    A fork shares the list and copies nothing: each chain reads it to its own length. The chain that ends
    where the list ends appends to it, which the others do not see; one that would write where another may
    read copies the list first.
    """

    __slots__ = ("_keys", "_length", "_shared")

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._keys = list(keys)
        self._length = len(self._keys)
        self._shared = False

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys[: self._length])

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return self._keys[slice(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"key {index} of {self._length}")
        return self._keys[index % self._length]

    def extend(self, keys: Iterable[bytes]) -> None:
        """Append the keys of the next blocks."""
        if self._length < len(self._keys):  # another chain may read the keys behind this one's end
            self._keys, self._shared = self._keys[: self._length], False
        self._keys.extend(keys)
        self._length = len(self._keys)

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` keys at most."""
        self._length = min(length, self._length)
        if not self._shared:
            del self._keys[self._length :]

    def copy(self, length: int) -> KeyChain:
        """Another chain with the first ``length`` keys at most. O(1)."""
        twin = KeyChain()
        twin._keys, twin._length = self._keys, min(length, self._length)
        twin._shared = self._shared = True
        return twin
