"""GGUF files: the model that the folder has, in every type and architecture; wrong ones refused in one line."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from holdfast.benchmarks.toys import make_toy
from holdfast.kernels.layer import LayerWeights
from holdfast.kernels.linear import Linear, Matrix
from holdfast.kernels.packed import Packed
from holdfast.kernels.packed_types import TYPES
from holdfast.runtime.build import load_engine
from holdfast.runtime.errors import ModelUnreadable
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.model.config import read_config, read_defaults
from holdfast.runtime.model.folder import find_model
from holdfast.runtime.model.gguf_file import SERVED
from holdfast.runtime.model.load import LoadedModel, load_model, open_weights
from holdfast.runtime.model.rope import Rope
from holdfast.runtime.model.weights import may_be_ignored, pieces_of
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import SamplingDefaults
from holdfast.sessions.errors import TokenizerUnreadable
from holdfast.sessions.text.tokenizer import ChatTokenizer

from ...kernels.packed_stage import dequantised, numbers_of
from .feeding import Fed, prompts
from .gguf_toys import KINDS, Draft, draft

SIZES = {"vocab_size": 272, "initializer_range": 0.1}
WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Types that the package can quantise to."""
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 32, "rope_theta": 5e5, "rms_norm_eps": 1e-5}),
    ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    ("gemma2", {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0}),
    ("granite", {"attention_bias": True}),
]


def toy(folder: Path, family: str = "llama", **changes: Any) -> Path:
    if family in ("gemma2", "gemma3_text"):  # as ggml computes them
        changes = {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6, **changes}
    return make_toy("tiny", folder, family=family, noise=0.3, **{**SIZES, **changes})


def matrices_of(model: LoadedModel) -> list[Matrix]:
    weights = model.decoder.weights
    layers = [getattr(layer, name) for layer in weights.layers for name in LayerWeights.__dataclass_fields__]
    found: list[Matrix] = []
    for one in (weights.embedding, weights.norm, weights.head, *layers):
        some = (*one.matrices, one.bias) if isinstance(one, Linear) else (one,)
        found += [part for part in some if part is not None]
    return found


def tensors_of(model: LoadedModel) -> list[torch.Tensor]:
    return list(map(numbers_of, matrices_of(model)))


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in KINDS), *VARIANTS],
    ids=lambda value: str(value)[:40],
)
def test_a_file_is_the_model_that_the_folder_is(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """All numbers of configuration and weights are equal, so nothing that is computed can differ."""
    folder = toy(tmp_path / "folder", family, **changes)
    file = draft(folder).write(tmp_path / "toy.gguf")
    theirs, ours = load_model(folder, "cpu", "float32"), load_model(file, "cpu", "float32")
    wanted, found = theirs.config.shaping_kv(), ours.config.shaping_kv()
    for name in wanted:
        assert (
            found[name] == pytest.approx(wanted[name], rel=1e-6) if isinstance(wanted[name], float) else True
        )
    assert ours.config.kind_of == theirs.config.kind_of
    assert [kind.window for kind in ours.config.kinds] == [kind.window for kind in theirs.config.kinds]
    pairs = list(zip(tensors_of(ours), tensors_of(theirs), strict=True))
    assert len(pairs) > 10 and all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)
    fed = Fed(ours, prompts(70, 20)).in_a_mix()
    expected = Fed(theirs, prompts(70, 20)).in_a_mix()
    assert torch.allclose(fed.logits(), expected.logits(), atol=2e-4, rtol=1e-4)


def reference(packed: np.ndarray, kind: str) -> torch.Tensor:
    """Not the package's own: that of transformers in torch; Q5_0 and Q5_1 one number at a time; MXFP4, which it
    lacks, by the package."""
    from transformers.integrations.gguf.dequant import dequantize

    if kind == "MXFP4":
        return torch.from_numpy(dequantised(kind, packed))
    if kind not in ("Q5_0", "Q5_1"):
        code = int(gguf.GGMLQuantizationType[kind])
        return dequantize(torch.from_numpy(packed), code, torch.float32).reshape(packed.shape[0], -1)
    size, rows = (22 if kind == "Q5_0" else 24), []
    for row in packed:
        numbers: list[float] = []
        for begin in range(0, len(row), size):
            block = row[begin : begin + size].tobytes()
            scale = struct.unpack_from("<e", block)[0]
            least = struct.unpack_from("<e", block, 2)[0] if kind == "Q5_1" else -16 * scale
            high, low = struct.unpack_from("<I", block, size - 20)[0], block[size - 16 :]
            for at in range(32):
                four = low[at % 16] >> 4 if at >= 16 else low[at] & 15
                numbers.append(scale * (four | (high >> at & 1) << 4) + least)
        rows.append(numbers)
    return torch.tensor(rows)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with rows of whole blocks of 256, for all types. Not grouped, so that q and k are alike."""
    return toy(
        tmp_path_factory.mktemp("wide"),
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=256,
        num_hidden_layers=1,
    )


def packed_draft(wide: Path, kind: str) -> Draft:
    """Matrices of ``kind``: quantised, or random blocks with small scales where the package cannot quantise."""
    made = draft(wide, kind if kind in WRITABLE else "F32")
    if kind in WRITABLE:
        return made
    items, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}.get(kind, (0, 2))  # of scales
    rng = np.random.default_rng(1)
    for name, (numbers, _) in made.tensors.items():
        if numbers.ndim == 2:
            blocks = rng.integers(0, 256, (numbers.size // items, size), dtype=np.uint8)
            for begin in at[: 1 if kind in ("IQ4_NL", "IQ4_XS") else 2]:
                scales = rng.uniform(1e-3, 2e-3, (len(blocks), 1)).astype("<f2").view(np.uint8)
                blocks[:, begin : begin + 2] = scales
            if kind == "MXFP4":
                blocks[:, 0] = rng.integers(116, 120, len(blocks))
            made.tensors[name] = (blocks.reshape(numbers.shape[0], -1), kind)
    return made


@pytest.mark.parametrize("kind", SERVED)
def test_every_type_is_unpacked_to_the_numbers_that_it_stands_for(
    kind: str, wide: Path, tmp_path: Path
) -> None:
    file = packed_draft(wide, kind).write(tmp_path / "toy.gguf")
    model = load_model(file, "cpu", "float32", keeping="packed")
    reader = gguf.GGUFReader(file)
    stored = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    for name, ours in (
        ("token_embd.weight", numbers_of(model.decoder.weights.embedding)),
        ("blk.0.attn_output.weight", numbers_of(model.decoder.weights.layers[0].output)),
        ("blk.0.ffn_down.weight", numbers_of(model.decoder.weights.layers[0].down)),
    ):
        data = stored[name]
        if kind in ("F32", "F16"):
            expected = torch.from_numpy(data).float()
        elif kind == "BF16":
            expected = torch.from_numpy(data.copy()).view(torch.bfloat16).float()
        else:
            expected = reference(data, kind)
        assert torch.equal(ours, expected.view(ours.shape)), name
    assert model.packed == ((kind,) if kind in TYPES else ())
    matrices = {id(part): part for part in matrices_of(model)}.values()  # a tied head once
    sizes = [part.data.nbytes if isinstance(part, Packed) else part.nbytes for part in matrices]
    assert model.weight_bytes == sum(sizes)
    dense = load_model(file, "cpu", "float32", keeping="dequantised")
    assert all(map(torch.equal, tensors_of(model), tensors_of(dense)))
    queries = numbers_of(model.decoder.weights.layers[0].qkv)[:256]
    if kind in ("Q4_K", "Q6_K"):  # rows of q: of each head 0, 2, 4, ..., then 1, 3, 5, ...
        rows = reference(stored["blk.0.attn_q.weight"], kind).view(4, 32, 2, 256)
        assert torch.equal(queries, rows.transpose(1, 2).reshape(256, 256))


def test_packed_weights_have_keys_of_their_own(wide: Path, tmp_path: Path) -> None:
    """What they compute is not what dequantised ones do."""
    file = packed_draft(wide, "Q8_0").write(tmp_path / "toy.gguf")
    models = [load_model(file, "cpu", "float32", keeping=one) for one in ("packed", "dequantised")]
    assert len({model.namespace() for model in models}) == 2


def test_an_engine_keeps_weights_packed_where_its_kernels_multiply_them_fast(
    wide: Path, tmp_path: Path
) -> None:
    file = packed_draft(wide, "Q8_0").write(tmp_path / "toy.gguf")
    sizes = {}
    for kernels, dtype in (("cpu", "auto"), ("cpu", "float32"), ("reference", "auto")):
        settings = EngineSettings(
            model=str(file), device="cpu", kernels=kernels, dtype=dtype, blocks=16, host_bytes=0
        )
        hello = load_engine(settings, lambda done, what: None, Liveness()).hello
        sizes[kernels, dtype] = hello.weights / hello.parameters
    assert sizes["reference", "auto"] == 2
    assert 1 < sizes["cpu", "auto"] < 1.1 and 1 < sizes["cpu", "float32"] < 1.1


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_K", "bfloat16")]
)
def test_the_serving_type_is_that_of_the_file(kind: str, dtype: str, wide: Path, tmp_path: Path) -> None:
    file = packed_draft(wide, kind).write(tmp_path / "toy.gguf")
    assert read_config(file).dtype == dtype


def frequencies_of(model: LoadedModel) -> torch.Tensor:
    return Rope(model.config.kinds[0].rope, torch.device("cpu")).frequencies


def test_rotary_factors_are_those_of_llama_3(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_theta": 10000.0}
    folder = toy(tmp_path / "folder", rope_parameters=scaling)
    theirs = load_model(folder, "cpu", "float32")
    made = draft(folder)
    plain = load_model(made.write(tmp_path / "plain.gguf"), "cpu", "float32")
    frequencies, usual = frequencies_of(theirs), frequencies_of(plain)
    made.tensors["rope_freqs.weight"] = ((usual / frequencies).numpy(), "F32")
    ours = load_model(made.write(tmp_path / "toy.gguf"), "cpu", "float32")
    assert torch.allclose(frequencies_of(ours), frequencies, rtol=1e-6)
    assert not torch.allclose(usual, frequencies)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            },
        ),
    ],
    ids=["linear", "yarn"],
)
def test_scaled_rotary_positions(keys: dict[str, Any], scaling: dict[str, Any], tmp_path: Path) -> None:
    folder = toy(tmp_path / "folder", rope_parameters=scaling)
    made = draft(folder)
    made.metadata |= {f"llama.{key}": value for key, value in keys.items()}
    ours = load_model(made.write(tmp_path / "toy.gguf"), "cpu", "float32")
    wanted = load_model(folder, "cpu", "float32")
    assert torch.equal(frequencies_of(ours), frequencies_of(wanted))
    assert ours.config.kinds[0].rope.gain == wanted.config.kinds[0].rope.gain


def test_gemma_3_stretches_only_the_layers_without_a_window(tmp_path: Path) -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    folder = toy(tmp_path / "folder", "gemma3_text", rope_parameters=ropes, num_hidden_layers=6)
    made = draft(folder)
    made.metadata |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    ours = read_config(made.write(tmp_path / "toy.gguf"))
    wanted = read_config(folder)
    assert ours.kind_of == wanted.kind_of and len(ours.kinds) == 2
    assert [kind.rope for kind in ours.kinds] == [kind.rope for kind in wanted.kinds]


def test_the_end_tokens_are_all_that_the_file_names(tmp_path: Path) -> None:
    made = draft(toy(tmp_path / "folder"))
    made.metadata |= {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 1}
    file = made.write(tmp_path / "toy.gguf")
    assert read_config(file).eos_ids == (2, 0, 1)
    assert read_defaults(file).temperature == 0.0


SAMPLED: dict[str, tuple[dict[str, Any], SamplingDefaults]] = {
    "nothing": ({}, SamplingDefaults()),
    "the file's own": (
        {"sampling.temp": 0.3, "sampling.top_k": 7, "sampling.penalty_repeat": 1.1, "name": "Qwen3 8B"},
        SamplingDefaults(temperature=0.3, top_k=7, repetition_penalty=1.1),
    ),
    "greedy by the file": ({"sampling.temp": 0.0, "basename": "smollm2"}, SamplingDefaults()),
    "by its base": ({"basename": "smollm2", "name": "x"}, SamplingDefaults(temperature=0.2, top_p=0.9)),
    "by its name": (
        {"name": "Qwen2.5 0.5B Instruct"},
        SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
    ),
    "of a later one": (
        {"name": "Qwen3-4B-Instruct-2507"},
        SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20),
    ),
    "with spaces": ({"name": "Meta Llama 3.1 8B Instruct"}, SamplingDefaults(temperature=0.6, top_p=0.9)),
    "of another family": ({"name": "Llama 2 7b Chat"}, SamplingDefaults()),
}
"""Keys below ``general``, and how the file is sampled by default."""


@pytest.mark.parametrize("name", SAMPLED)
def test_it_is_sampled_as_the_file_or_its_authors_say_and_the_operator_is_told(
    name: str, tmp_path: Path
) -> None:
    keys, wanted = SAMPLED[name]
    made = draft(toy(tmp_path / "folder"))
    for known in ("general.name", "general.basename"):
        made.metadata.pop(known, None)
    made.metadata |= {f"general.{key}": value for key, value in keys.items()}
    file = made.write(tmp_path / "toy.gguf")
    assert read_defaults(file) == wanted
    (note,) = read_config(file).notes
    assert ("greedy by default" in note) == (name in ("nothing", "of another family"))
    assert ("https://" in note) == (
        name not in ("nothing", "of another family", "the file's own", "greedy by the file")
    )


def test_the_namespace_of_kv_is_that_of_the_files_content(tmp_path: Path) -> None:
    """Not of its name: a copy finds what is on disk, and another content does not."""
    made = draft(toy(tmp_path / "folder"))
    one = load_model(made.write(tmp_path / "one.gguf"), "cpu", "float32")
    copied = load_model(made.write(tmp_path / "copy.gguf"), "cpu", "float32")
    numbers, kind = made.tensors["output_norm.weight"]
    made.tensors["output_norm.weight"] = (numbers * 1.5, kind)
    other = load_model(made.write(tmp_path / "one.gguf"), "cpu", "float32")
    names = [model.namespace() for model in (one, copied, other)]
    assert names[0] == names[1] != names[2]


# --- what is wrong ------------------------------------------------------------------------------------------


def check(path: Path) -> None:
    """All that is checked before anything is allocated."""
    file = find_model(str(path))
    config = read_config(file)
    with open_weights(file, config) as weights:
        weights.check(pieces_of(config), lambda name: may_be_ignored(name, config))


def refusal(path: Path) -> str:
    with pytest.raises(ModelUnreadable) as caught:
        check(path)
    assert "\n" not in caught.value.message and str(path) in caught.value.message
    return caught.value.message


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Draft]:
    folder = toy(tmp_path_factory.mktemp("sound"))
    return lambda: draft(folder)


def test_a_sound_file_passes_also_with_keys_that_change_nothing(
    made: Callable[[], Draft], tmp_path: Path
) -> None:
    sound = made()
    sound.metadata |= {"llama.expert_count": 0, "llama.attention.causal": True, "general.license": "mit"}
    sound.metadata |= {"llama.tensor_data_layout": "Meta AI original pth", "split.count": 0}
    check(sound.write(tmp_path / "toy.gguf"))


HEADER = b"GGUF" + struct.pack("<I", 3)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def row(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def counts(tensors: int, keys: int) -> bytes:
    return HEADER + struct.pack("<QQ", tensors, keys)


BYTES = {
    "zero length": (b"", "empty"),
    "another format": (b"PK\3\4" + bytes(64), "not a GGUF file"),
    "only the magic": (b"GGUF", "the version"),
    "an old version": (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1"),
    "a big-endian file": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
    "a count of tensors that is absurd": (counts(1 << 60, 0), "the number of tensors"),
    "a count of keys that is absurd": (counts(0, 1 << 60), "the number of metadata keys"),
    "a name longer than the file": (counts(0, 1) + struct.pack("<Q", 1 << 62), "metadata key 0"),
    "an unknown type of value": (counts(0, 1) + text("a.b") + struct.pack("<I", 99), "a.b: .* type 99"),
    "an array longer than the file": (
        counts(0, 1) + text("a.b") + struct.pack("<IIQ", 9, 4, 1 << 61),
        "a.b: it goes beyond",
    ),
    "an array of an absurd number of strings": (
        counts(0, 1) + text("a.b") + struct.pack("<IIQ", 9, 8, 1 << 61),
        "a.b: .* strings",
    ),
    "an array of arrays": (counts(0, 1) + text("a.b") + struct.pack("<IIQ", 9, 9, 1), "a.b: .*arrays"),
    "a string that is not UTF-8": (
        counts(0, 1) + text("a.b") + struct.pack("<IQ", 8, 1) + b"\xff",
        "a.b: not UTF-8",
    ),
    "a key that is not printable": (counts(0, 1) + text("a\nb"), "metadata key 0: 'a.nb' is not printable"),
    "a tensor's name that is not printable": (counts(1, 0) + row("t\x1b", [8]), "tensor 0: .* printable"),
    "a doubled key": (counts(0, 2) + (text("a.b") + struct.pack("<IB", 7, 1)) * 2, "a.b: doubled"),
    "a doubled tensor": (counts(2, 0) + row("t", [8]) * 2 + bytes(128), "t: doubled"),
    "a tensor beyond the file": (counts(1, 0) + row("t", [1 << 20]) + bytes(128), "t: it ends at byte"),
    "a tensor of an absurd size": (counts(1, 0) + row("t", [1 << 63, 1 << 63]), "t: it ends at byte"),
    "a tensor at an absurd place": (
        counts(1, 0) + row("t", [8], offset=(1 << 64) - 32) + bytes(64),
        "t: it ends at byte",
    ),
    "a tensor without numbers": (counts(1, 0) + row("t", [0, 8]) + bytes(64), "t: shape"),
    "a tensor without dimensions": (counts(1, 0) + row("t", []) + bytes(64), "t: shape"),
    "too many dimensions": (counts(1, 0) + text("t") + struct.pack("<I", 1 << 31), "t: .* dimensions"),
    "an unknown type of tensor": (counts(1, 0) + row("t", [8], 999) + bytes(64), "t: type number 999"),
    "a type that is not served": (counts(1, 0) + row("t", [256], 16) + bytes(128), "t: type IQ2_XXS"),
    "rows that are no whole blocks": (counts(1, 0) + row("t", [40], 8) + bytes(128), "t: rows of 40"),
    "tensors that overlap": (
        counts(2, 0) + row("t", [16]) + row("u", [8], offset=32) + bytes(256),
        "u: it overlaps t",
    ),
    "a tensor that is not aligned": (
        counts(1, 0) + row("t", [8], offset=4) + bytes(128),
        "t: its offset 4",
    ),
    "an alignment of zero": (
        counts(0, 1) + text("general.alignment") + struct.pack("<II", 4, 0),
        "general.alignment",
    ),
    "no metadata at all": (counts(0, 0), "general.architecture: missing"),
}


@pytest.mark.parametrize("name", BYTES)
def test_a_broken_header_is_refused(name: str, tmp_path: Path) -> None:
    content, words = BYTES[name]
    path = tmp_path / "toy.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelUnreadable, match=words):
        check(path)
    refusal(path)


def test_a_file_cut_anywhere_is_refused(made: Callable[[], Draft], tmp_path: Path) -> None:
    whole = made().write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "toy.gguf"
    rng = np.random.default_rng(0)
    for length in (*rng.integers(4, len(whole), 60).tolist(), len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "cut short" in refusal(path)


Change = Callable[[Draft], object]
NORM, TABLE, DOWN = "blk.1.attn_norm.weight", "token_embd.weight", "blk.0.ffn_down.weight"
LIES: dict[str, tuple[Change, str]] = {
    "a missing tensor": (lambda it: it.tensors.pop(DOWN), f"{DOWN}: missing"),
    "a tensor too many": (
        lambda it: it.tensors.update({"blk.0.extra.weight": (np.zeros(4, np.float32), "F32")}),
        "blk.0.extra.weight: the metadata ask for no such tensor",
    ),
    "a wrong shape": (
        lambda it: it.tensors.update({NORM: (np.zeros(65, np.float32), "F32")}),
        rf"{NORM}: shape \[65\], the metadata ask for \[64\]",
    ),
    "a transposed matrix": (
        lambda it: it.tensors.update({DOWN: (it.tensors[DOWN][0].T.copy(), "F32")}),
        f"{DOWN}: shape",
    ),
    "fewer tokens than rows": (
        lambda it: it.metadata.update(
            {
                "tokenizer.ggml.tokens": ["a", "b"],
                "tokenizer.ggml.token_type": [1, 1],
                "tokenizer.ggml.bos_token_id": 0,
                "tokenizer.ggml.eos_token_id": 1,
                "llama.vocab_size": 2,
            }
        ),
        f"{TABLE}: shape",
    ),
    "more token types than tokens": (
        lambda it: it.metadata.update({"tokenizer.ggml.tokens": ["a", "b"], "llama.vocab_size": 2}),
        "tokenizer.ggml.token_type: 272 numbers for 2 tokens",
    ),
    "another vocab_size": (lambda it: it.metadata.update({"llama.vocab_size": 9}), "llama.vocab_size: 9"),
    "no tokens": (
        lambda it: it.metadata.pop("tokenizer.ggml.tokens"),
        "tokenizer.ggml.tokens: missing",
    ),
    "no number of layers": (lambda it: it.metadata.pop("llama.block_count"), "llama.block_count: missing"),
    "an absurd number of layers": (
        lambda it: it.metadata.update({"llama.block_count": 1 << 31}),
        "llama.block_count: a whole number",
    ),
    "more layers than there are": (
        lambda it: it.metadata.update({"llama.block_count": 4000}),
        "blk.2.attn_q.weight: missing",
    ),
    "no norm": (
        lambda it: it.metadata.pop("llama.attention.layer_norm_rms_epsilon"),
        "llama.attention.layer_norm_rms_epsilon: missing",
    ),
    "a norm that is not a number": (
        lambda it: it.metadata.update({"llama.attention.layer_norm_rms_epsilon": float("nan")}),
        "layer_norm_rms_epsilon: a finite number",
    ),
    "layers of several sizes": (
        lambda it: it.metadata.update({"llama.feed_forward_length": [96, 64]}),
        "llama.feed_forward_length: a whole number",
    ),
    "heads that do not divide": (
        lambda it: it.metadata.update({"llama.attention.head_count_kv": 3}),
        "num_key_value_heads: 3 does not divide 4",
    ),
    "an architecture that is not served": (
        lambda it: it.metadata.update({"general.architecture": "mamba"}),
        "general.architecture: mamba is not served",
    ),
    "a key that nothing reads": (
        lambda it: it.metadata.update({"llama.expert_count": 8}),
        "llama.expert_count: 8 is not served",
    ),
    "attention in both directions": (
        lambda it: it.metadata.update({"llama.attention.causal": False}),
        "llama.attention.causal: False is not served",
    ),
    "one of several files": (
        lambda it: it.metadata.update({"split.count": 3}),
        "split.count: one of 3 files is not served",
    ),
    "part of a head rotated": (
        lambda it: it.metadata.update({"llama.rope.dimension_count": 8}),
        "llama.rope.dimension_count: 8 of a head of 16",
    ),
    "a rotary scaling without a name": (
        lambda it: it.metadata.update({"llama.rope.scaling.type": [1, 2]}),
        "llama.rope.scaling.type: a string is expected",
    ),
    "a kind of rotary scaling": (
        lambda it: it.metadata.update({"llama.rope.scaling.type": "spiral"}),
        "rope.scaling.type: 'spiral'",
    ),
    "rotary factors of another size": (
        lambda it: it.tensors.update({"rope_freqs.weight": (np.ones(5, np.float32), "F32")}),
        "rope_freqs.weight: shape",
    ),
    "rotary factors of zero": (
        lambda it: it.tensors.update({"rope_freqs.weight": (np.zeros(8, np.float32), "F32")}),
        "factor",
    ),
    "an end token beyond the vocabulary": (
        lambda it: it.metadata.update({"tokenizer.ggml.eos_token_id": 272}),
        "eos_token_id: 272",
    ),
    "an end token that is no number": (
        lambda it: it.metadata.update({"tokenizer.ggml.eos_token_id": "two"}),
        "eos_token_id",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_file_that_lies_is_refused(name: str, made: Callable[[], Draft], tmp_path: Path) -> None:
    lying, (change, words) = made(), LIES[name]
    change(lying)
    path = lying.write(tmp_path / "toy.gguf")
    with pytest.raises(ModelUnreadable, match=words):
        check(path)
    refusal(path)


@pytest.mark.parametrize("seed", range(4))
def test_a_header_with_wrong_bytes_is_read_or_refused(
    seed: int, made: Callable[[], Draft], tmp_path: Path
) -> None:
    """No other error comes of it, and nothing is read that is not there."""
    whole = made().write(tmp_path / "whole.gguf").read_bytes()
    length = whole.index(b"blk.1.ffn_up.weight")
    rng, path = random.Random(seed), tmp_path / "toy.gguf"
    refused: list[str] = []
    for _ in range(150):
        broken = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            broken[rng.randrange(length)] = rng.choice((0, 1, 9, 127, 255, rng.randrange(256)))
        path.write_bytes(broken)
        try:
            check(path)
            ChatTokenizer.load(path)
        except (ModelUnreadable, TokenizerUnreadable) as error:
            refused.append(error.message)
    assert len(refused) > 50 and all(message.isprintable() for message in refused)
