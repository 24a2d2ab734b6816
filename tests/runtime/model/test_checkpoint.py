"""Weights files that are wrong: each refused in one line that names file and tensor."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.runtime.errors import ModelUnreadable, ShardMissing, TensorInvalid
from holdfast.runtime.model.checkpoint import INDEX, SINGLE, Checkpoint
from holdfast.runtime.model.weights import Piece

QUERY = "model.layers.0.self_attn.q_proj.weight"
WANTED = [Piece("a", (2, 3), "x"), Piece("b", (4,), "y")]


def raw(header: dict | bytes, body: bytes, length: int | None = None) -> bytes:
    """A safetensors file by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(act: Callable[[], object], kind: type[ModelUnreadable] = TensorInvalid) -> str:
    with pytest.raises(kind) as caught:
        act()
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def index_of(shards: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((shards / INDEX).read_text())["weight_map"]
    return weight_map


def write_index(shards: Path, weight_map: object) -> None:
    (shards / INDEX).write_text(json.dumps({"weight_map": weight_map}))


BROKEN = {
    "empty": b"",
    "three bytes": b"abc",
    "header too long": raw({}, b"", length=10**12),
    "header not JSON": raw(b'{"a":', b""),
    "ranges overlap": raw({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)),
    "a hole": raw({"a": entry(0, 8, [2]), "b": entry(16, 24, [2])}, bytes(24)),
    "cut short": raw({"a": entry(0, 8, [2])}, bytes(4)),
    "bytes behind": raw({"a": entry(0, 8, [2])}, bytes(40)),
    "shape against range": raw({"a": entry(0, 8, [3])}, bytes(8)),
    "unknown type": raw({"a": entry(0, 8, [2], "Q9")}, bytes(8)),
    "shape overflows": raw({"a": entry(0, 8, [2**62, 2**62])}, bytes(8)),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_broken_headers(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    assert refusal(lambda: Checkpoint(tmp_path)).startswith(f"{tmp_path / SINGLE}: ")


def test_overlap_names_the_tensor(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(BROKEN["ranges overlap"])
    assert "`b`" in refusal(lambda: Checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a": torch.zeros(2, 3)}, "b: missing"),
        (
            {"a": torch.zeros(3, 2), "b": torch.zeros(4)},
            r"a: shape [3, 2], config.json asks for [2, 3]",
        ),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(4, 1)}, "b: shape [4, 1]"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int64)}, "b: type I64 is not served"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(1)}, "c: config.json asks for no"),
    ],
)
def test_tensors_that_are_not_what_the_model_needs(tensors: dict, words: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint:
        message = refusal(lambda: checkpoint.check(WANTED, lambda name: False))
    assert message.startswith(f"{tmp_path / SINGLE}: {words}")


def test_ignorable_tensors_are_ignored(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(1)}, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.check(WANTED, lambda name: name == "c")


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert "safetensors only" in refusal(lambda: Checkpoint(tmp_path), ShardMissing)


def test_a_shard_of_the_index_is_missing(shards: Path) -> None:
    gone = sorted(shards.glob("model-*.safetensors"))[1]
    gone.unlink()
    message = refusal(lambda: Checkpoint(shards), ShardMissing)
    assert message == f"{gone}: missing, {INDEX} names it"


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin", 3]
)
def test_an_index_that_leaves_its_folder(name: object, shards: Path) -> None:
    write_index(shards, {**index_of(shards), QUERY: name})
    message = refusal(lambda: Checkpoint(shards))
    assert message.startswith(f"{shards / INDEX}: {QUERY}: {name!r} is not the name")


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map(weight_map: object, shards: Path) -> None:
    write_index(shards, weight_map)
    assert "weight_map: an object" in refusal(lambda: Checkpoint(shards))


def test_an_index_that_points_to_the_wrong_shard(shards: Path) -> None:
    weight_map = index_of(shards)
    other = next(name for name in weight_map.values() if name != weight_map[QUERY])
    write_index(shards, {**weight_map, QUERY: other})
    assert f"{QUERY}: said to be in {other}, but is in {weight_map[QUERY]}" in refusal(
        lambda: Checkpoint(shards)
    )
    write_index(shards, {**weight_map, "ghost": other})
    assert f"ghost: said to be in {other}, but is in no shard" in refusal(lambda: Checkpoint(shards))


def test_a_tensor_in_two_shards(shards: Path) -> None:
    first, second = sorted(shards.glob("model-*.safetensors"))[:2]
    twice = load_file(first)
    save_file({**load_file(second), **twice}, second)
    assert f"also in {first.name}" in refusal(lambda: Checkpoint(shards))


def test_symbolic_links_are_followed(folder: Path, tmp_path: Path) -> None:
    """As the hub's cache lays a snapshot out."""
    (folder / SINGLE).rename(tmp_path / "blob")
    (folder / SINGLE).symlink_to("../blob")
    with Checkpoint(folder) as checkpoint:
        assert QUERY in checkpoint.tensors


def test_a_symbolic_link_to_nowhere(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to("../blob")
    message = refusal(lambda: Checkpoint(folder), ShardMissing)
    assert message == f"{folder / SINGLE}: a symbolic link to ../blob, which is not there"


def test_a_symbolic_link_to_itself(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(SINGLE)
    assert "a symbolic link" in refusal(lambda: Checkpoint(folder), ShardMissing)


def test_a_folder_where_a_file_should_be(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()
    assert refusal(lambda: Checkpoint(folder), ShardMissing) == f"{folder / SINGLE}: not a file"


def test_a_digest_follows_content_not_place(folder: Path, tiny: Path, tmp_path: Path) -> None:
    def digest(where: Path) -> bytes:
        with Checkpoint(where) as checkpoint:
            checkpoint.start_digest()
            return checkpoint.digest()

    before = digest(folder)
    assert before == digest(tiny)
    assert len(before) == 32
    content = bytearray((folder / SINGLE).read_bytes())
    content[-1] ^= 1
    (folder / SINGLE).write_bytes(content)
    assert digest(folder) != before


def test_reading_gives_the_stored_tensors(sharded: Path) -> None:
    with Checkpoint(sharded) as checkpoint:
        assert len(checkpoint.shards) > 1
        for shard in checkpoint.shards:
            for name, tensor in load_file(shard).items():
                assert torch.equal(checkpoint.read(name), tensor)
