"""Quantised checkpoints of every kind: the numbers that they mean, logits and tokens against transformers, what
is kept in which form, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast import LLM, SamplingParams, TokensPrompt
from holdfast.benchmarks.toys import make_toy, teach
from holdfast.kernels.backends import Needs, choose
from holdfast.kernels.linear import Permuted
from holdfast.kernels.names import AT_LOAD
from holdfast.runtime.build import load_engine
from holdfast.runtime.errors import SettingsInvalid, TensorInvalid
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.model import load
from holdfast.runtime.model.checkpoint import SINGLE
from holdfast.runtime.model.config import read_config
from holdfast.runtime.model.kv_format import KVFormat
from holdfast.runtime.model.load import Keeping, LoadedModel, load_model
from holdfast.runtime.model.quantisation import LinearRule
from holdfast.runtime.model.quantised_weights import QuantisedCheckpoint
from holdfast.runtime.model.weights import pieces_of
from holdfast.runtime.settings import EngineSettings

from ...kernels.packed_stage import numbers_of
from . import quantised_toys as toys
from .feeding import Fed, prompts, theirs, transformers_model
from .quantised_toys import Kind, Toy

KINDS: dict[str, Kind] = {
    "compressed-tensors int4": toys.pack_quantized(4, 32),
    "compressed-tensors int4 zeros": toys.pack_quantized(4, 32, zeros=True),
    "compressed-tensors int4 by row": toys.pack_quantized(4, 0),
    "compressed-tensors int4 ordered": toys.pack_quantized(4, 32, order=True),
    "compressed-tensors int8": toys.pack_quantized(8, 32, zeros=True),
    "compressed-tensors int8 by row": toys.pack_quantized(8, 0),
    "compressed-tensors W8A8": toys.w8a8(),
    "compressed-tensors W8A8 naive": toys.w8a8("naive-quantized"),
    "compressed-tensors FP8": toys.float_quantized(),
    "compressed-tensors FP8 by tensor": toys.float_quantized("tensor"),
    "compressed-tensors FP8 static": toys.float_quantized("tensor", static=True),
    "compressed-tensors MXFP4": toys.mxfp4(),
    "MXFP4 blocks": toys.mxfp4(blocks=True),
    "GPTQ": toys.gptq(4, 32),
    "GPTQ without sym": toys.gptq(4, 32, sym=False),
    "GPTQ by row, no g_idx": toys.gptq(4, -1, g_idx=False),
    "GPTQ ordered": toys.gptq(4, 32, order=True, sym=False),
    "GPTQ v2, 8 bits": toys.gptq(8, 32, sym=False, v2=True),
    "AWQ": toys.awq(32),
    "block FP8": toys.block_fp8(),
}
GREEDY = SamplingParams(temperature=0, max_tokens=8)
EIGHT_BITS = ", activations int8 in groups of 32"
"""What a processor adds."""
PACKED = {name for name in KINDS if "FP8" not in name}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy of odd widths: 160 and 96, and of rows that fill no panel and no block."""
    shape = {"hidden_size": 160, "intermediate_size": 96, "num_attention_heads": 5, "num_key_value_heads": 1}
    return make_toy("tiny", tmp_path_factory.mktemp("odd"), head_dim=32, projection_scale=1.5, **shape)


@pytest.fixture(scope="module")
def written(odd: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Toy]:
    made: dict[str, Toy] = {}

    def get(name: str) -> Toy:
        if name not in made:
            made[name] = toys.make(odd, tmp_path_factory.mktemp("kind"), KINDS[name])
        return made[name]

    return get


def rounding(toy: Toy) -> Any:
    """Transformers on the numbers that the codes stand for, each linear with rounded inputs."""
    model = transformers_model(toy.plain)
    for name, module in model.named_modules():
        if (rounded := toy.activations.get(name)) is not None:
            module.register_forward_pre_hook(lambda _, given, rounded=rounded: (rounded(given[0]),))
    return model


def numbers(model: LoadedModel) -> list[torch.Tensor]:
    return [
        numbers_of(one)
        for layer in model.decoder.weights.layers
        for one in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("keeping", ["dequantised", "quantised", "packed"])
def test_a_checkpoint_has_the_numbers_that_its_codes_stand_for(
    name: str, keeping: Keeping, written: Callable[[str], Toy]
) -> None:
    toy = written(name)
    got = load_model(toy.folder, "cpu", "float32", keeping=keeping)
    wanted = load_model(toy.plain, "cpu", "float32")
    for one, other in zip(numbers(got), numbers(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    words = KINDS[name].words
    kept = keeping == "quantised" or (keeping == "packed" and name in PACKED)
    if not kept:
        words = f"{words.split(', ')[0]}, dequantised"
    elif keeping == "packed" and "activations" not in words:
        words += EIGHT_BITS
    assert got.quantisation == (words,) and wanted.quantisation == ()
    assert bool(got.packed) is (keeping == "packed" and name in PACKED)
    parts = {id(part): part for part in matrices(got)}.values()
    assert got.weight_bytes == sum(bytes_of(part) for part in parts)


def matrices(model: LoadedModel) -> list[Any]:
    weights = model.decoder.weights
    found: list[Any] = [weights.embedding, weights.norm, *weights.head.matrices]
    for layer in weights.layers:
        for one in (layer.qkv, layer.output, layer.gate_up, layer.down):
            found += [part.matrix if isinstance(part, Permuted) else part for part in one.matrices]
        norms = [
            getattr(layer, name)
            for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")
        ]
        found += [norm for norm in norms if norm is not None]
        if layer.head_norm is not None:  # stored once for all heads
            found += [layer.head_norm[0], layer.head_norm[-1]]
    return found


def bytes_of(part: Any) -> int:
    return int(part.data.nbytes if hasattr(part, "kind") else part.nbytes)


@pytest.mark.parametrize("name", KINDS)
def test_logits_and_tokens_are_those_of_a_torch_reference(name: str, written: Callable[[str], Toy]) -> None:
    """With the same quantisation, also of activations: within 1e-3 of the logits' greatest."""
    toy = written(name)
    ours = load_model(toy.folder, "cpu", "float32", keeping="quantised")
    fed = Fed(ours, prompts(40)).in_chunks(17).go_on(8)
    wanted = theirs(rounding(toy), fed.prompts[0])
    assert (fed.logits() - wanted).abs().max() < 1e-3 * float(wanted.abs().max())
    assert torch.equal(wanted[39:-1].argmax(-1), fed.prompts[0][40:])


@pytest.mark.parametrize("name", ["compressed-tensors int4", "GPTQ ordered", "compressed-tensors W8A8"])
def test_a_cpu_computes_what_the_reference_does(name: str, written: Callable[[str], Toy]) -> None:
    """In panels: within 2 % of the greatest logit of the reference on the same panels (a sum in another order
    may round an activation to the next of 255 numbers), with its tokens; and within 5 % of the model that
    rounds as the checkpoint says alone."""
    toy = written(name)
    model = load_model(toy.folder, "cpu", "float32", keeping="packed")
    kernels = choose("cpu", torch.device("cpu"), Needs(torch.float32, packed=model.packed)).kernels
    ours = replace(model, decoder=model.decoder.computing_by(kernels))
    fed = Fed(ours, prompts(40, 9)).in_a_mix().go_on(8)
    wanted = Fed(model, [*fed.prompts]).in_chunks(64).logits()
    assert (fed.logits() - wanted).abs().max() < 0.02 * float(wanted.abs().max())
    assert torch.equal(wanted[39:-1].argmax(-1), fed.prompts[0][40:])
    exact = theirs(rounding(toy), fed.prompts[0])
    assert (fed.logits() - exact).abs().max() < 0.05 * float(exact.abs().max())


def test_an_engine_keeps_a_checkpoint_quantised_and_says_so(written: Callable[[str], Toy]) -> None:
    toy, found = written("compressed-tensors int4"), {}
    for kernels, dtype in (("cpu", "bfloat16"), ("cpu", "float32"), ("reference", "bfloat16")):
        settings = EngineSettings(
            model=str(toy.folder), device="cpu", kernels=kernels, dtype=dtype, blocks=16, host_bytes=0
        )
        hello = load_engine(settings, lambda done, what: None, Liveness()).hello
        found[kernels, dtype] = hello.quantisation, round(8 * hello.weights / hello.parameters)
    words = "int4 in groups of 32"
    assert found == {
        ("cpu", "bfloat16"): (words + EIGHT_BITS, 7),  # a third of the toy is its embedding
        ("cpu", "float32"): (words + EIGHT_BITS, 9),
        ("reference", "bfloat16"): (words, 6),
    }


def test_a_checkpoint_is_served_with_the_tokens_of_the_reference(written: Callable[[str], Toy]) -> None:
    toy = written("compressed-tensors int4")
    teach(toy.folder)
    (prompt,) = prompts(40)
    model = load_model(toy.folder, "cpu", "float32", keeping="packed")
    wanted = Fed(model, [prompt]).in_chunks(64).go_on(8).prompts[0][40:].tolist()
    engine = EngineSettings(model="", kernels="cpu", blocks=64, host_bytes=0)
    with LLM(str(toy.folder), dtype="float32", device="cpu", engine=engine) as llm:
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=prompt.tolist()), GREEDY)
    assert list(output.outputs[0].token_ids) == wanted


@pytest.mark.parametrize("kind", AT_LOAD)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_model_is_quantised_at_load(kind: str, dtype: str, odd: Path) -> None:
    """Linears alone: embedding and head stay. What is computed is near what the model computes."""
    whole = load_model(odd, "cpu", dtype)
    got = load_model(odd, "cpu", dtype, keeping="quantised", quantization=kind)
    panels = load_model(odd, "cpu", dtype, keeping="packed", quantization=kind)
    assert all(map(torch.equal, numbers(got), numbers(panels))) or kind == "fp8"
    for one, other in zip(numbers(got), numbers(load_model(odd, "cpu", "float32")), strict=True):
        step = {"int8": 1 / 127, "int4": 1 / 7, "fp8": 1 / 14}[kind] * float(other.abs().max())
        assert not torch.equal(one, other) and (one - other).abs().max() < 0.51 * step
    assert isinstance(got.decoder.weights.embedding, torch.Tensor)
    fed, exact = (Fed(one, prompts(40)).in_chunks(40).logits() for one in (got, whole))
    assert (fed - exact).abs().mean() < {"int8": 0.05, "int4": 0.5, "fp8": 0.2}[kind] * float(exact.std())
    words = {
        "int4": ("int4 in groups of 32", "int4 in groups of 96"),
        "int8": ("int8 by row",),
        "fp8": ("fp8 by row, activations fp8 by token",),
    }
    assert tuple(one.replace("160", "32") for one in got.quantisation) == words[kind]


def test_a_quantised_model_is_not_quantised_again(written: Callable[[str], Toy]) -> None:
    folder = written("AWQ").folder
    with pytest.raises(
        SettingsInvalid, match=r"--quantization int8: .*already: int4 in groups of 32 with zeros"
    ):
        load_model(folder, "cpu", quantization="int8")


def test_each_arithmetic_has_keys_of_its_own(odd: Path, written: Callable[[str], Toy]) -> None:
    folder = written("compressed-tensors int4").folder
    models = [load_model(folder, "cpu", "float32", keeping=one) for one in get_args(Keeping)]
    models += [load_model(folder, "cpu", "bfloat16")]
    models += [load_model(odd, "cpu", "float32", quantization=one) for one in (None, *AT_LOAD)]
    kernels = choose("cpu", torch.device("cpu"), Needs(torch.float32)).kernels
    models += [replace(models[1], decoder=models[1].decoder.computing_by(kernels))]
    spaces = [model.namespace() for model in models]
    assert len({*spaces}) == len(spaces)
    again = load_model(folder, "cpu", "bfloat16")
    assert again.namespace() == spaces[3]


def test_linears_that_are_not_quantised_are_read_as_they_are(odd: Path, tmp_path: Path) -> None:
    """Whatever a list of exceptions says: what is stored counts. A map of both kinds is dequantised."""
    kind = replace(toys.pack_quantized(4, 32), only=r"q_proj|mlp")
    toy = toys.make(odd, tmp_path, kind, torch.bfloat16)
    got = load_model(toy.folder, "cpu", "float32", keeping="packed")
    wanted = load_model(toy.plain, "cpu", "float32")
    assert all(map(torch.allclose, numbers(got), numbers(wanted)))
    words = "int4 in groups of 32"
    assert got.quantisation == (words + EIGHT_BITS, f"{words}, dequantised")


def test_linears_of_several_schemes(odd: Path, tmp_path: Path) -> None:
    """As their names, patterns and classes say; a name goes before a pattern for all."""
    toy = toys.make(odd, tmp_path, toys.two_groups())
    got = load_model(toy.folder, "cpu", "float32", keeping="quantised")
    wanted = load_model(toy.plain, "cpu", "float32")
    assert all(map(torch.allclose, numbers(got), numbers(wanted)))
    assert got.quantisation == ("int4 in groups of 32", "int8 by row, activations int8 by token")


def test_a_rule_has_the_names_of_the_shards(odd: Path, tmp_path: Path) -> None:
    """Which are others than the decoder's in a multimodal checkpoint."""
    toy = toys.make(odd, tmp_path, toys.pack_quantized(4, 32))
    stored = load_file(toy.folder / SINGLE)
    save_file({f"text.{name}": tensor for name, tensor in stored.items()}, toy.folder / SINGLE)
    rule = LinearRule("packed", "int4", 4, 32, targets=("text.model.layers.0.mlp.up_proj",))
    (piece,) = (
        one for one in pieces_of(read_config(toy.folder)) if one.name.endswith("0.mlp.up_proj.weight")
    )
    with QuantisedCheckpoint(toy.folder, (rule,), lambda name: name.removeprefix("text.")) as shards:
        shards.check([piece], lambda name: True)
        assert [*shards.linears] == ["model.layers.0.mlp.up_proj.weight"]


def test_odd_widths_are_kept_as_codes_or_dequantised(tmp_path: Path) -> None:
    """A width that no group of 32 fits has no panels."""
    shape = {"hidden_size": 72, "intermediate_size": 88, "num_attention_heads": 3, "num_key_value_heads": 1}
    source = make_toy("tiny", tmp_path / "source", head_dim=24, **shape)
    for number, kind in enumerate((toys.w8a8(), toys.pack_quantized(4, 0), toys.float_quantized())):
        toy = toys.make(source, tmp_path / str(number), kind)
        wanted = numbers(load_model(toy.plain, "cpu", "float32"))
        for keeping in get_args(Keeping):
            got = load_model(toy.folder, "cpu", "float32", keeping=keeping)
            assert all(map(torch.allclose, numbers(got), wanted))
            assert ("dequantised" in got.quantisation[0]) is (keeping != "quantised")
        fed = Fed(load_model(toy.folder, "cpu", "float32", keeping="quantised"), prompts(30)).in_chunks(30)
        exact = theirs(rounding(toy), fed.prompts[0])
        assert (fed.logits() - exact).abs().max() < 1e-3 * float(exact.abs().max())


def test_scales_of_kv_are_folded_into_dequantised_weights(written: Callable[[str], Toy]) -> None:
    toy = written("GPTQ")
    kv = KVFormat("float8_e4m3fn", 2.0, 0.5)
    got, wanted = (load_model(one, "cpu", "float32", kv=kv) for one in (toy.folder, toy.plain))
    assert all(map(torch.allclose, numbers(got), numbers(wanted)))
    assert got.quantisation == ("int4 in groups of 32, dequantised",)


def test_biases_of_0_that_gptq_has_written_are_ignored(odd: Path, tmp_path: Path) -> None:
    toy = toys.make(odd, tmp_path, toys.gptq(4, 32))
    stored = load_file(toy.folder / SINGLE)
    name = "model.layers.0.self_attn.q_proj.bias"
    save_file({**stored, name: torch.zeros(160).half()}, toy.folder / SINGLE)
    assert load_model(toy.folder, "cpu").quantisation
    save_file({**stored, name: torch.ones(160).half()}, toy.folder / SINGLE)
    with pytest.raises(TensorInvalid, match=rf"{name}: config\.json asks for no such tensor"):
        load_model(toy.folder, "cpu")


# --- what is refused ------------------------------------------------------------------------------------------

UP = "model.layers.1.mlp.up_proj"


def changed(**parts: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    """Changes tensors of one linear: None takes one away, a function makes another of it."""

    def act(tensors: dict[str, torch.Tensor]) -> None:
        for suffix, change in parts.items():
            before = tensors.pop(f"{UP}.{suffix}", torch.zeros(1))
            if change is not None:
                tensors[f"{UP}.{suffix}"] = change(before).contiguous()

    return act


def with_(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def act(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.clone()
        found.view(-1)[-1] = value
        return found

    return act


WRONG = {
    "scale infinite": (
        "compressed-tensors int4",
        changed(weight_scale=with_(torch.inf)),
        "weight_scale: a scale is not",
    ),
    "scale NaN": ("GPTQ", changed(scales=with_(torch.nan)), r"scales: a scale is not finite"),
    "exponent NaN": (
        "MXFP4 blocks",
        changed(weight_scales=with_(255)),
        "weight_scales: a scale is not finite",
    ),
    "block scale": (
        "block FP8",
        changed(weight_scale_inv=with_(-torch.inf)),
        "weight_scale_inv: a scale is not",
    ),
    "input scale 0": (
        "compressed-tensors FP8 static",
        changed(input_scale=with_(0)),
        "input_scale: 0 is not above 0",
    ),
    "no scales": (
        "compressed-tensors FP8",
        changed(weight_scale=None),
        r"weight_scale: missing, .*weight needs it",
    ),
    "no zeros": ("AWQ", changed(qzeros=None), "qzeros: missing"),
    "no shape": ("compressed-tensors int4", changed(weight_shape=None), "weight_shape: missing"),
    "no input scale": ("compressed-tensors FP8 static", changed(input_scale=None), "input_scale: missing"),
    "a shape that lies": (
        "compressed-tensors int4",
        changed(weight_shape=lambda one: one * 2),
        r"weight_shape: says \[192, 320\], config\.json asks for \[96, 160\]",
    ),
    "codes cut": (
        "GPTQ",
        changed(qweight=lambda one: one[:-1]),
        r"qweight: shape \[19, 96\], config\.json asks for \[20, 96\]",
    ),
    "codes of AWQ cut": (
        "AWQ",
        changed(qweight=lambda one: one[:, :-1]),
        r"qweight: shape \[160, 11\], config\.json asks for",
    ),
    "scales cut": (
        "compressed-tensors int4",
        changed(weight_scale=lambda one: one[:, :-1]),
        r"weight_scale: shape \[96, 4\], config\.json asks for \[96, 5\] \(intermediate_size",
    ),
    "scales of integers": (
        "AWQ",
        changed(scales=lambda one: one.int()),
        r"scales: type I32 is not served \(F32, BF16, F16\)",
    ),
    "codes of floats": ("GPTQ", changed(qweight=lambda one: one.float()), "qweight: type F32 is not served"),
    "two scales": (
        "compressed-tensors FP8",
        changed(weight_scale_inv=lambda one: torch.ones(96, 1)),
        "weight_scale_inv: .*weight has .*weight_scale already",
    ),
    "order beyond the groups": (
        "GPTQ ordered",
        changed(g_idx=with_(9)),
        "g_idx: not 32 columns of each group",
    ),
    "order of negative groups": (
        "GPTQ ordered",
        changed(g_idx=with_(-1)),
        "g_idx: not 32 columns of each group",
    ),
    "order that is not told": (
        "GPTQ",
        changed(g_idx=lambda one: one.flip(0)),
        "g_idx: columns are out of order",
    ),
    "zeros that are not told": ("GPTQ", changed(qzeros=with_(3)), "qzeros: not 7 everywhere"),
    "a zero too large": ("GPTQ v2, 8 bits", changed(qzeros=lambda one: one * 0 - 1), None),
    "KV scales": ("AWQ", changed(k_scale=lambda one: one), "k_scale: config.json asks for no such tensor"),
    "codes of e5m2": (
        "compressed-tensors FP8",
        changed(weight=lambda one: one.float().to(torch.float8_e5m2)),
        "weight: type F8_E5M2 is not served",
    ),
    "neither codes nor weight": ("GPTQ", changed(qweight=None), r"up_proj\.weight: missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_are_wrong_are_refused_before_memory_is_taken(
    name: str, odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, change, words = WRONG[name]
    toy = toys.make(odd, tmp_path, KINDS[kind])
    stored = load_file(toy.folder / SINGLE)
    change(stored)
    save_file(stored, toy.folder / SINGLE)
    if words is None:  # 255 is the greatest zero of 8 bits
        assert load_model(toy.folder, "cpu").quantisation
        return
    monkeypatch.setattr(load, "allocate", lambda *_: pytest.fail("allocated"))
    with pytest.raises(TensorInvalid, match=words) as caught:
        load_model(toy.folder, "cpu")
    assert caught.value.message.startswith(f"{toy.folder / SINGLE}: ") and "\n" not in caught.value.message


def test_a_group_that_does_not_fit_is_refused(written: Callable[[str], Toy], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written("AWQ").folder, tmp_path / "model"))
    config = KINDS["AWQ"].config
    toys.edit(folder, quantization_config={**config, "group_size": 64})
    with pytest.raises(TensorInvalid, match=r"q_proj\.qweight: groups of 64 do not fit its 160 columns"):
        load_model(folder, "cpu")
    toys.edit(folder, quantization_config={**config, "group_size": 160})
    with pytest.raises(
        TensorInvalid, match=r"q_proj\.qzeros: shape \[5, 20\], config\.json asks for \[1, 20\]"
    ):
        load_model(folder, "cpu")


@pytest.mark.parametrize("cut", [1, 1000, 60_000])
def test_a_file_that_is_cut_short_is_refused(cut: int, written: Callable[[str], Toy], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written("GPTQ").folder, tmp_path / "model"))
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:-cut])
    with pytest.raises(TensorInvalid, match=str(folder / SINGLE)):
        load_model(folder, "cpu")
