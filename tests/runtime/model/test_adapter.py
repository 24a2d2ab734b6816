"""Adapters that peft has written, against peft's own output; what is refused, and what the refusal says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.benchmarks.toys import FAMILIES, make_adapter, make_toy
from holdfast.runtime.errors import AdapterInvalid
from holdfast.runtime.model.adapter import AdapterMaps, fill_slot, read_adapter
from holdfast.runtime.model.kv_format import KVFormat
from holdfast.runtime.model.load import LoadedModel, load_model
from holdfast.tests.runtime.model.feeding import Fed, prompts, theirs, transformers_model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # peft asks for it

Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def adapted(model: LoadedModel, *folders: Path, rank: int = 64) -> LoadedModel:
    """The model with these adapters in its slots, in order, and one slot more."""
    maps = AdapterMaps(model.config, model.decoder.dtype, model.kv)
    decoder = maps.with_slots(model.decoder, len(folders) + 1, rank)
    for slot, folder in enumerate(folders):
        fill_slot(decoder.weights, slot, read_adapter(folder, maps, rank))
    return replace(model, decoder=decoder)


def peft_writes(folder: Path, base: Path, seed: int, **config: Any) -> None:
    """An adapter with random weights, made and saved by peft."""
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        told = {
            "r": 8,
            "lora_alpha": 12,
            "target_modules": "all-linear",
            "init_lora_weights": False,
            **config,
        }
        model = peft.get_peft_model(transformers_model(base), peft.LoraConfig(task_type="CAUSAL_LM", **told))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0.0, 0.2)
    model.save_pretrained(folder)


def peft_reads(folder: Path, base: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(transformers_model(base), folder).eval()


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_every_family_computes_what_peft_does(kind: str, tmp_path: Path) -> None:
    base = make_toy("tiny", tmp_path / "base", family=kind, noise=0.3)
    peft_writes(tmp_path / "adapter", base, seed=1)
    model = adapted(load_model(base, "cpu", "float32"), tmp_path / "adapter")
    fed = Fed(model, prompts(50, 20), slots=[0, -1]).in_a_mix()
    reference = peft_reads(tmp_path / "adapter", base)
    wanted = theirs(reference, fed.prompts[0])
    plain = theirs(transformers_model(base), fed.prompts[0])
    assert (wanted - plain).abs().max() > 0.05
    torch.testing.assert_close(fed.logits(0), wanted, rtol=2e-5, atol=2e-4)
    torch.testing.assert_close(
        fed.logits(1), theirs(transformers_model(base), fed.prompts[1]), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(
    "config",
    [
        {"r": 1},
        {"r": 33, "lora_alpha": 7.5},
        {"use_rslora": True},
        {"target_modules": ["q_proj", "down_proj"]},
        {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"o_proj": 5, "layers.1.mlp.up_proj": 40}},
        {"layers_to_transform": [1], "target_modules": ["q_proj", "up_proj"]},
    ],
    ids=str,
)
def test_every_setting_means_what_it_means_to_peft(config: dict[str, Any], tmp_path: Path) -> None:
    base = make_toy("tiny", tmp_path / "base", noise=0.3)
    peft_writes(tmp_path / "adapter", base, seed=2, **config)
    model = adapted(load_model(base, "cpu", "float32"), tmp_path / "adapter")
    fed = Fed(model, prompts(40), slots=[0]).in_chunks(13)
    reference = peft_reads(tmp_path / "adapter", base)
    torch.testing.assert_close(fed.logits(), theirs(reference, fed.prompts[0]), rtol=2e-5, atol=2e-4)


def test_many_adapters_in_one_batch_are_each_as_alone(tmp_path: Path) -> None:
    base = make_toy("tiny", tmp_path / "base", noise=0.3)
    folders = [make_adapter(tmp_path / f"{one}", base, rank=4 * one + 1, seed=one) for one in range(6)]
    model = adapted(load_model(base, "cpu", "float32"), *folders)
    slots = [3, 0, -1, 5, 1, 2, 4, 0]
    together = Fed(model, prompts(*[30] * 8), slots=slots).in_a_mix()
    for row, slot in enumerate(slots):
        alone = Fed(model, [together.prompts[row]], slots=[slot]).in_chunks(30)
        torch.testing.assert_close(together.logits(row), alone.logits(), rtol=0, atol=1e-4)
    assert (together.logits(1) - together.logits(7)).abs().max() > 0.1  # one adapter, other prompts


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "phi3"])
def test_scales_of_k_and_v_are_folded_into_adapters_too(kind: str, tmp_path: Path) -> None:
    base = make_toy("tiny", tmp_path / "base", family=kind, noise=0.3)
    modules = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if kind == "phi3" else None
    more = {} if modules is None else {"modules": modules}
    folder = make_adapter(tmp_path / "adapter", base, seed=3, **more)
    logits = []
    for kv in (KVFormat(), KVFormat("auto", 0.5, 0.25)):
        model = adapted(load_model(base, "cpu", "float32", kv=kv), folder)
        logits.append(Fed(model, prompts(40), slots=[0]).in_chunks(13).logits())
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-3)


def test_a_digest_is_of_configuration_and_weights(tmp_path: Path) -> None:
    base = make_toy("tiny", tmp_path / "base")
    maps = AdapterMaps(load_model(base, "cpu").config, torch.float32)
    folders = [make_adapter(tmp_path / f"{one}", base, seed=seed) for one, seed in enumerate((0, 0, 1))]
    folders.append(make_adapter(tmp_path / "alpha", base, lora_alpha=5))
    digests = [read_adapter(folder, maps).digest for folder in folders]
    assert digests[0] == digests[1] and len(set(digests)) == 3


# --- what is refused
# --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, AdapterMaps]:
    """A sound adapter, and the maps of its model."""
    folder = tmp_path_factory.mktemp("adapters")
    base = make_toy("tiny", folder / "base")
    make_adapter(folder / "sound", base, rank=4)
    return folder / "sound", AdapterMaps(load_model(base, "cpu").config, torch.float16)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type: 'IA3' is not served"),
    ({"bias": "all"}, "bias: 'all' is not served"),
    ({"use_dora": True}, "use_dora: DoRA: not served"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save: whole modules"),
    ({"lora_bias": True}, "lora_bias"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"r": 0}, "r: a whole number from 1 to 256 is expected, not 0"),
    ({"r": 257}, "r: a whole number from 1 to 256 is expected, not 257"),
    ({"r": True}, "r: a whole number"),
    ({"r": "16"}, "r: a whole number"),
    ({"r": 80}, "r: rank 80 is above --max-lora-rank 64"),
    ({"rank_pattern": {"q_proj": 400}}, r"rank_pattern\.q_proj: a whole number"),
    ({"rank_pattern": {"(a+)+$": 4}}, "rank_pattern: '.*': the end of a module's name is expected"),
    ({"rank_pattern": [4]}, "rank_pattern: an object is expected"),
    ({"lora_alpha": 0}, "lora_alpha: a finite number above 0"),
    ({"lora_alpha": None}, "lora_alpha: missing"),
    ({"lora_alpha": float("nan")}, "lora_alpha: a finite number above 0"),
    ({"alpha_pattern": {"q_proj": float("inf")}}, r"alpha_pattern\.q_proj: a finite number"),
    ({"r": 8}, rf"{WEIGHTS}: .*_proj\.lora_[AB]\.weight: shape \[.*4.*\], rank and model ask for \[.*8.*\]"),
]


def changed(sound: Path, folder: Path, **config: Any) -> Path:
    shutil.copytree(sound, folder)
    told = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**told, **config}))
    return folder


@pytest.mark.parametrize(("config", "words"), CONFIGS, ids=str)
def test_configurations_are_refused_by_file_and_field(
    config: dict[str, Any], words: str, here: tuple[Path, AdapterMaps], tmp_path: Path
) -> None:
    folder = changed(here[0], tmp_path / "bad", **config)
    with pytest.raises(AdapterInvalid, match=words) as caught:
        read_adapter(folder, here[1], 64)
    assert str(folder) in caught.value.message and "\n" not in caught.value.message


def one_more(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


TENSORS: list[tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = [
    (one_more("base_model.model.model.embed_tokens.lora_embedding_A", 4, 256), "embeddings are not served"),
    (one_more("base_model.model.lm_head.lora_A.weight", 4, 64), "embeddings are not served"),
    (
        one_more("base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", 4, 64),
        "has no linear layer model.layers.9",
    ),
    (one_more("model.layers.0.mlp.up_proj.lora_A.weight", 4, 64), "not the name of a tensor of LoRA"),
    (
        one_more("base_model.model.model.layers.0.mlp.up_proj.weight", 96, 64),
        "not the name of a tensor of LoRA",
    ),
    (one_more("base_model.model.model.layers.0.input_layernorm.lora_A.weight", 4, 64), "has no linear layer"),
    (
        lambda tensors: tensors.pop(Q0.format("B")),
        r"q_proj\.lora_B\.weight: missing, its other half is there",
    ),
    (one_more(Q0.format("A"), 4, 65), r"shape \[4, 65\], rank and model ask for \[4, 64\]"),
    (one_more(Q0.format("B"), 32, 4), r"shape \[32, 4\], rank and model ask for \[64, 4\]"),
    (
        lambda tensors: tensors[Q0.format("A")].fill_(float("nan")),
        r"q_proj\.lora_A\.weight: not all its numbers are",
    ),
    (
        lambda tensors: tensors[Q0.format("B")][3].fill_(float("inf")),
        r"q_proj\.lora_B\.weight: not all its numbers",
    ),
    (lambda tensors: tensors[Q0.format("B")].fill_(1e6), r"q_proj\.lora_B\.weight: too large for float16"),
    (
        lambda tensors: tensors.update({Q0.format("A"): torch.zeros((4, 64), dtype=torch.int8)}),
        "type I8 is not served",
    ),
    (lambda tensors: tensors.clear(), "it holds no tensors"),
]


@pytest.mark.parametrize(("change", "words"), TENSORS, ids=[words[:50] for _, words in TENSORS])
def test_tensors_are_refused_by_file_and_name(
    change: Callable[[dict[str, torch.Tensor]], Any],
    words: str,
    here: tuple[Path, AdapterMaps],
    tmp_path: Path,
) -> None:
    folder = changed(here[0], tmp_path / "bad")
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(AdapterInvalid, match=words) as caught:
        read_adapter(folder, here[1], 64)
    assert str(folder / WEIGHTS) in caught.value.message and "\n" not in caught.value.message


def test_broken_files_are_refused_before_a_tensor_is_read(
    here: tuple[Path, AdapterMaps], tmp_path: Path
) -> None:
    """Cut at any part, with a header that lies, or none at all; a folder that is none; a pickle beside it."""
    whole = (here[0] / WEIGHTS).read_bytes()
    header = int.from_bytes(whole[:8], "little")
    lies = whole.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1)
    longer = (1 << 40).to_bytes(8, "little") + whole[8:]
    broken = [
        b"",
        whole[:7],
        whole[: header // 2],
        whole[: header + 20],
        whole[:-1],
        whole + b"x",
        lies,
        longer,
    ]
    for number, data in enumerate(broken):
        folder = changed(here[0], tmp_path / f"{number}")
        (folder / WEIGHTS).write_bytes(data)
        with pytest.raises(AdapterInvalid) as caught:
            read_adapter(folder, here[1])
        assert str(folder / WEIGHTS) in caught.value.message and "\n" not in caught.value.message
    (folder / CONFIG).write_text("{")
    with pytest.raises(AdapterInvalid, match=f"{CONFIG}: not JSON"):
        read_adapter(folder, here[1])
    (folder / CONFIG).unlink()
    with pytest.raises(AdapterInvalid, match=f"{CONFIG}: No such file"):
        read_adapter(folder, here[1])
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(AdapterInvalid, match=r"missing \(weights are read from safetensors only"):
        read_adapter(folder, here[1])
    with pytest.raises(AdapterInvalid, match="not a folder"):
        read_adapter(here[0] / CONFIG, here[1])


DURING = """
import os, sys
from pathlib import Path
from holdfast.runtime.errors import AdapterInvalid
from holdfast.runtime.model import adapter
from holdfast.runtime.model.adapter import WEIGHTS, AdapterMaps, read_adapter
from holdfast.runtime.model.load import load_model
import torch
folder, base, other = map(Path, sys.argv[1:])
opened = adapter.opened_file
def opening(*given, **named):
    file = opened(*given, **named)
    if other.exists():
        os.replace(other / WEIGHTS, folder / WEIGHTS)
    else:
        os.truncate(folder / WEIGHTS, 4096)
    return file
adapter.opened_file = opening
maps = AdapterMaps(load_model(base, "cpu").config, torch.float32)
try:
    read_adapter(folder, maps)
except AdapterInvalid as error:
    print(error.message)
"""


@pytest.mark.parametrize("how", ["cut", "replaced"])
def test_weights_that_change_while_they_are_read_are_refused(
    how: str, here: tuple[Path, AdapterMaps], tmp_path: Path
) -> None:
    """Cut, they would kill the process that maps them, a process of its own here; replaced, they would be read
    under the digest of others."""
    folder, other, base = changed(here[0], tmp_path / "changing"), tmp_path / "other", here[0].parent / "base"
    if how == "replaced":
        make_adapter(other, base, rank=4, seed=1)
    command = [sys.executable, "-c", DURING, str(folder), str(base), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == f"{folder}: it changed while it was read\n", (done.returncode, done.stderr)


def test_a_configuration_that_is_no_file_or_has_no_end_is_refused(
    here: tuple[Path, AdapterMaps], tmp_path: Path
) -> None:
    """Reading a pipe would wait for ever, and so would all adapters after it."""
    folder = changed(here[0], tmp_path / "bad")
    os.truncate(folder / CONFIG, 1 << 40)
    with pytest.raises(AdapterInvalid, match=f"{CONFIG}: 1099511627776 bytes, at most"):
        read_adapter(folder, here[1])
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)
    with pytest.raises(AdapterInvalid, match=f"{CONFIG}: not a file"):
        read_adapter(folder, here[1])
