"""Block keys: what they depend on, that they are stable, and that nothing else matters."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from holdfast.kvstore.groups import HeadLayout, KVGroup
from holdfast.kvstore.keys import KEY_BYTES, BlockHasher, namespace_digest

SECRET = bytes(range(32))
TOKENS = arrays.arrays(np.int64, st.integers(0, 40), elements=st.integers(0, 3))
GROUP = KVGroup(0, (0, 1), layout=HeadLayout(2, 8), dtype="float32")


def test_the_vector_holds_over_restarts() -> None:
    """Keys stand in the store: if this changes, LAYOUT_VERSION must, and every record is lost."""
    hasher = BlockHasher(SECRET, 4)
    root = hasher.root(b"namespace", b"tenant")
    assert root.hex() == "97b8be3eb12fb0084b85a1015c64a1b7"
    assert [key.hex() for key in hasher.chain(root, np.arange(9))] == [
        "b3f30c86462fafc529045af3e8d18bed",
        "d6478cdc51cda48075662742d3fc82fc",
    ]


def test_the_formula_is_keyed_blake2b() -> None:
    hasher = BlockHasher(SECRET, 2)
    parent = b"p" * KEY_BYTES
    data = parent + (7).to_bytes(8, "little") + (2**33).to_bytes(8, "little")
    expected = hashlib.blake2b(data, key=SECRET, digest_size=16, person=b"holdfast.block").digest()
    assert hasher.chain(parent, np.array([7, 2**33])) == [expected]


@given(TOKENS, st.integers(1, 5))
def test_a_chain_is_its_steps_and_has_full_blocks_only(tokens: np.ndarray, size: int) -> None:
    hasher = BlockHasher(SECRET, size)
    parent = hasher.root(b"n", b"")
    keys = hasher.chain(parent, tokens)
    assert len(keys) == len(tokens) // size
    for at, key in enumerate(keys):
        assert len(key) == KEY_BYTES
        [parent] = hasher.chain(parent, tokens[at * size : (at + 1) * size])
        assert parent == key
    cut = len(keys) // 2
    if cut:
        assert hasher.chain(keys[cut - 1], tokens[cut * size :]) == keys[cut:]


@given(TOKENS, TOKENS)
def test_keys_are_equal_exactly_where_prefixes_are(left: np.ndarray, right: np.ndarray) -> None:
    hasher = BlockHasher(SECRET, 3)
    root = hasher.root(b"n", b"")
    for at, (one, other) in enumerate(
        zip(hasher.chain(root, left), hasher.chain(root, right), strict=False), 1
    ):
        assert (one == other) == (left[: at * 3].tolist() == right[: at * 3].tolist())


@given(TOKENS)
def test_the_array_s_type_and_strides_do_not_matter(tokens: np.ndarray) -> None:
    hasher = BlockHasher(SECRET, 4)
    root = hasher.root(b"n", b"")
    keys = hasher.chain(root, tokens)
    assert hasher.chain(root, tokens.astype(np.int32)) == keys
    assert hasher.chain(root, np.repeat(tokens, 2)[::2]) == keys


def test_every_part_of_the_name_matters() -> None:
    """Parent, namespace, salt, secret, and the border between namespace and salt."""
    tokens = np.arange(4)
    hasher = BlockHasher(SECRET, 4)
    roots = [
        hasher.root(b"name", b"salt"),
        hasher.root(b"other", b"salt"),
        hasher.root(b"name", b"other"),
        hasher.root(b"names", b"alt"),
        hasher.root(b"name", b""),
        BlockHasher(SECRET[::-1], 4).root(b"name", b"salt"),
    ]
    assert len(set(roots)) == len(roots)
    keys = [hasher.chain(root, tokens)[0] for root in roots]
    keys += BlockHasher(SECRET[::-1], 4).chain(roots[0], tokens)
    assert len(set(keys)) == len(keys)


def test_a_partial_block_has_no_key() -> None:
    assert BlockHasher(SECRET, 4).chain(b"", np.arange(3)) == []


@pytest.mark.parametrize("secret", [b"", b"short", bytes(65)])
def test_a_secret_is_one(secret: bytes) -> None:
    with pytest.raises(AssertionError, match=f"secret has {len(secret)} bytes"):
        BlockHasher(secret, 16)


def test_every_part_of_the_namespace_matters() -> None:
    def digest(**changed: object) -> bytes:
        parts = {"weights": b"w", "config": {"rope_theta": 1e6, "layers": 2}, "adapter": b"", "numerics": {}}
        return namespace_digest(**{**parts, **changed})  # type: ignore[arg-type]

    digests = [
        digest(),
        digest(weights=b"x"),
        digest(config={"rope_theta": 1e4, "layers": 2}),
        digest(adapter=b"a"),
        digest(numerics={"kernels": "cpu/1"}),
        digest(numerics={"kernels": "cpu/2"}),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(config={"layers": 2, "rope_theta": 1e6}) == digests[0], "order does not matter"


def test_records_have_a_space_for_each_namespace_secret_and_layout_of_kv() -> None:
    hasher = BlockHasher(SECRET, 16)
    other = KVGroup(0, (0, 1), layout=HeadLayout(2, 8), dtype="float16")
    spaces = [
        hasher.space(b"name", [GROUP]),
        hasher.space(b"other", [GROUP]),
        hasher.space(b"name", [other]),
        hasher.space(b"name", [GROUP, other]),
        hasher.space(b"name", [other, GROUP]),
        BlockHasher(SECRET[::-1], 16).space(b"name", [GROUP]),
    ]
    assert len(set(spaces)) == len(spaces)
