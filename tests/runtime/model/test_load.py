"""Loading whole models: types, tied heads, progress, digests, and errors before any memory is taken."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.runtime.errors import ModelUnreadable, SettingsInvalid, TensorInvalid
from holdfast.runtime.model import load
from holdfast.runtime.model.checkpoint import SINGLE
from holdfast.runtime.model.load import device_named, load_model

from ...kernels.packed_stage import numbers_of


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def edit(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_progress_rises_to_one_and_says_what(tiny: Path) -> None:
    told: list[tuple[float, str]] = []
    load_model(tiny, "cpu", progress=lambda done, what: told.append((done, what)))
    shares = [done for done, _ in told]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert "model.norm.weight" in told[-1][1]


def test_fused_weights_are_the_stored_ones(tiny: Path) -> None:
    stored, model = load_file(tiny / SINGLE), load_model(tiny, "cpu")
    layer = model.decoder.weights.layers[1]
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    assert torch.equal(
        numbers_of(layer.qkv), torch.cat([stored[f"{attention}{one}_proj.weight"] for one in "qkv"])
    )
    assert torch.equal(
        numbers_of(layer.gate_up),
        torch.cat([stored[f"{mlp}{one}_proj.weight"] for one in ("gate", "up")]),
    )
    assert layer.head_norm is not None
    assert torch.equal(layer.head_norm[3], stored[f"{attention}q_norm.weight"])
    assert torch.equal(layer.head_norm[4], stored[f"{attention}k_norm.weight"])


def test_a_tied_head_is_the_embedding(tiny: Path, sharded: Path) -> None:
    tied, own = load_model(tiny, "cpu"), load_model(sharded, "cpu")
    assert tied.decoder.weights.head.matrices[0] is tied.decoder.weights.embedding
    head, embedding = own.decoder.weights.head, own.decoder.weights.embedding
    assert not torch.equal(numbers_of(head), numbers_of(embedding))
    assert tied.parameters == sum(tensor.numel() for tensor in load_file(tiny / SINGLE).values())
    assert own.parameters == tied.parameters + 256 * 64


def test_the_copy_of_a_tied_head_is_ignored_and_an_untied_one_needed(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    copy = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": copy}, folder / SINGLE)
    tied = load_model(folder, "cpu")
    assert tied.decoder.weights.head.matrices[0] is tied.decoder.weights.embedding
    assert (tied.config.tied_head, tied.config.notes) == (True, ())
    save_file(tensors, folder / SINGLE)
    edit(folder, tie_word_embeddings=False)
    with pytest.raises(TensorInvalid, match=r"model\.safetensors: lm_head\.weight: missing"):
        load_model(folder, "cpu")


def test_a_stored_head_that_is_not_the_embedding_is_served_whatever_the_file_says(folder: Path) -> None:
    """As in transformers, which unties them. They are compared in the type that is served."""
    tensors = load_file(folder / SINGLE)
    embedding = tensors["model.embed_tokens.weight"].bfloat16().float()
    near = embedding * (1 + 2**-20)
    save_file({**tensors, "model.embed_tokens.weight": embedding, "lm_head.weight": near}, folder / SINGLE)
    own, tied = load_model(folder, "cpu", "float32"), load_model(folder, "cpu", "bfloat16")
    assert torch.equal(numbers_of(own.decoder.weights.head), near)
    assert own.config.notes == ("lm_head.weight is not the embedding: it is served, not tie_word_embeddings",)
    assert own.parameters == tied.parameters + 256 * 64
    assert tied.decoder.weights.head.matrices[0] is tied.decoder.weights.embedding
    save_file({**tensors, "lm_head.weight": torch.zeros(256, 32)}, folder / SINGLE)
    with pytest.raises(TensorInvalid, match=r"lm_head\.weight: shape \[256, 32\], config\.json asks for"):
        load_model(folder, "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_become_the_type_asked_for(dtype: str, tiny: Path) -> None:
    decoder = load_model(tiny, "cpu", dtype).decoder
    expected = load_file(tiny / SINGLE)["model.norm.weight"].to(getattr(torch, dtype))
    assert torch.equal(decoder.weights.norm, expected)
    assert decoder.dtype == getattr(torch, dtype)


def test_auto_is_the_stored_type(folder: Path) -> None:
    assert load_model(folder, "cpu").decoder.dtype == torch.float32
    edit(folder, dtype="bfloat16")
    assert load_model(folder, "cpu").decoder.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", "int8"), ("cpu", "cuda"), ("abacus", "auto"), ("cpu:x", "auto"), ("meta?", "auto")],
)
def test_unknown_devices_and_dtypes_are_refused(device: str, dtype: str, tiny: Path) -> None:
    with pytest.raises(SettingsInvalid, match=r"device|dtype") as caught:
        load_model(tiny, device, dtype)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 32},
        {"vocab_size": 2**31 - 1},
        {"num_hidden_layers": 90},
        {"attention_bias": True},
    ],
)
def test_nothing_is_allocated_for_a_model_that_does_not_fit_its_files(
    change: dict, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(folder, **change)
    monkeypatch.setattr(load, "allocate", lambda *_: pytest.fail("allocated"))
    with pytest.raises(ModelUnreadable, match=str(folder)):
        load_model(folder, "cpu")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"hidden_size": 32},
            r"embed_tokens\.weight: shape .* asks for \[256, 32\] \(vocab_size, hidden_size\)",
        ),
        ({"vocab_size": 300}, r"embed_tokens\.weight: .*\[300, 64\] \(vocab_size, hidden_size\)"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"layers\.2\.self_attn\.q_proj\.weight: missing"),
        (
            {"num_hidden_layers": 1, "layer_types": None},
            r"layers\.1\..*: config\.json asks for no such tensor",
        ),
        ({"num_attention_heads": 2}, r"q_proj\.weight: .*\(num_attention_heads, .*head_dim"),
        ({"head_dim": 32}, r"q_proj\.weight: .*\(num_attention_heads, .*head_dim"),
        ({"intermediate_size": 8}, r"gate_proj\.weight: .*\(intermediate_size, hidden_size\)"),
        ({"attention_bias": True}, r"q_proj\.bias: missing, config\.json asks for it \(attention_bias"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight: missing.* tie_word_embeddings\)"),
    ],
)
def test_a_setting_that_does_not_fit_the_weights_is_named(change: dict, words: str, folder: Path) -> None:
    edit(folder, **change)
    with pytest.raises(TensorInvalid, match=words) as caught:
        load_model(folder, "cpu")
    assert str(folder / SINGLE) in caught.value.message
    assert "\n" not in caught.value.message


def test_namespaces_differ_by_weights_rotation_and_type(folder: Path, tiny: Path) -> None:
    def namespace(where: Path, dtype: str = "auto") -> bytes:
        return load_model(where, "cpu", dtype).namespace()

    plain = namespace(tiny)
    assert namespace(folder) == plain
    others = {namespace(tiny, "bfloat16")}
    edit(folder, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    others.add(namespace(folder))
    save_file({**load_file(tiny / SINGLE), "model.norm.weight": torch.zeros(64)}, folder / SINGLE)
    others.add(namespace(folder))
    assert len({plain, *others}) == 4


def test_the_kv_group_is_the_models(tiny: Path) -> None:
    (group,) = load_model(tiny, "cpu", "bfloat16").kv_groups(8)
    assert group.block_shape == (2, 2, 2, 8, 16)
    assert group.dtype == "bfloat16"


def test_cuda_on_a_torch_built_without_it_says_what_to_install(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(
        SettingsInvalid, match="built without CUDA: install a build of torch for your CUDA, or"
    ):
        load_model(tiny, "cuda")


OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
)


def _devices(monkeypatch: pytest.MonkeyPatch, count: int, fault: str = "") -> None:
    """As if torch were built for CUDA and saw so many devices."""

    def empty(*_: object, **__: object) -> None:
        if fault:
            raise RuntimeError(fault)

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.parametrize("name", ["cuda:2", "cuda:7"])
def test_a_gpu_that_is_not_there_is_named_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _devices(monkeypatch, 2)
    with pytest.raises(SettingsInvalid, match=f"device {name}: there is none; there are cuda:0, cuda:1"):
        device_named(name)
    assert [device_named(one).index for one in ("cuda", "cuda:1")] == [None, 1]


def test_a_driver_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _devices(monkeypatch, 0, fault=OLD_DRIVER)
    with pytest.raises(SettingsInvalid, match="device cuda: The NVIDIA driver on your system is too old"):
        device_named("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(warnings.warn(OLD_DRIVER, stacklevel=1)))
    assert device_named("auto").type == "cpu"
    assert "computing on the CPU: The NVIDIA driver on your system is too old" in caplog.text
