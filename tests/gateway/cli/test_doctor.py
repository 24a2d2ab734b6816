"""Doctor: the arithmetic it shows is that of the engine it describes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.benchmarks.toys import make_toy, teach
from holdfast.gateway.cli import doctor
from holdfast.kernels.device import CpuDevice, Memory
from holdfast.runtime import build
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.model import config
from holdfast.runtime.model.folder import find_model
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import SamplingDefaults
from holdfast.sessions.errors import TemplateFailed

from ...sessions.text.published_templates import (
    AS_USER,
    FOLDED,
    NOT_SHOWN,
    PUBLISHED,
    UNKNOWN,
    UNWRITTEN,
    tokenizer_of,
)

POCKET = EngineSettings(model="pocket", device="cpu", dtype="float32", kv_bytes=8 << 20)


def number(text: str) -> int:
    """The result of a product that is written out."""
    return int(re.search(r"= ([\d,]+)", text)[1].replace(",", ""))


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_it_tells_how_weights_are_quantised_and_what_they_take(kernels: str) -> None:
    from holdfast.runtime.build import load_engine

    asked = msgspec.structs.replace(POCKET, quantization="int8", kernels=kernels)
    hello = load_engine(asked, lambda done, what: None, Liveness()).hello
    told = dict(doctor.model(asked))["weights"]
    assert f" in {hello.quantisation}; and float32 = {hello.weights:,} B" in told
    rounded = ", activations int8 in groups of 32" if kernels == "cpu" else ""
    assert hello.quantisation == f"int8 by row{rounded}"


def test_its_arithmetic_is_the_engines() -> None:
    from holdfast.runtime.build import load_engine

    hello = load_engine(POCKET, lambda done, what: None, Liveness()).hello
    facts = dict(doctor.model(POCKET))
    assert number(facts["weights"]) == hello.parameters * 4 == hello.weights
    assert re.match(r"at most [\d,]+ tokens/s: 13\.51 MiB a token at ", facts["one sequence"])
    assert number(facts["KV per token"]) * hello.block_tokens == hello.block_bytes
    assert facts["KV per token"] == "4 layers × 2 (k, v) × 2 heads × 64 dim × 4 bytes (float32) = 4,096 B"
    assert f"{hello.blocks:,} blocks" in facts["KV on cpu"]
    assert number(facts["tokens that fit"]) == hello.blocks * hello.block_tokens
    assert f"({hello.max_context:,})" in facts["sessions that fit"]
    assert facts["chat template"].startswith("append-only")
    assert facts["kernels"].split()[0] == hello.kernels
    assert facts["size of KV"] == "kv_bytes = 8 MiB, as asked"
    assert "weights 13.51 MiB + KV 8 MiB" in facts["memory"]
    assert facts["sampling"] == "greedy" and hello.defaults == SamplingDefaults()


@pytest.mark.parametrize(
    "name", ["qwen3", "mistral-small-3.2", "gpt-oss", "glm-4.5", "gemma-2", "granite-3.0"]
)
def test_it_tells_of_a_template_what_the_table_of_templates_has(name: str, tmp_path: Path) -> None:
    found = PUBLISHED[name]
    tokenizer_of(name).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(found.named))
    (tmp_path / "chat_template.jinja").write_text(found.template)
    facts = dict(doctor.language_facts(tmp_path))
    told, results = facts["chat template"], found.results
    assert ("shows no tools" in told) == (results["tools"] == NOT_SHOWN)
    assert ("first user message" in told) == (results["system"] == FOLDED)
    assert ("outputs are user messages" in told) == (results["second_turn"] == AS_USER)
    form = "unknown" if results["calls"] in (UNKNOWN, NOT_SHOWN) else results["calls"]
    if form != UNWRITTEN:  # then only signs in the template show a form
        assert facts["calls, reasoning"].startswith(form)


def test_it_refuses_a_template_that_needs_what_nothing_gives(tmp_path: Path) -> None:
    tokenizer_of("firefunction-v2").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(PUBLISHED["firefunction-v2"].template)
    with pytest.raises(TemplateFailed, match=r"chat_template\.jinja: .* 'functions' is undefined"):
        dict(doctor.language_facts(tmp_path))


def test_the_makers_sampling_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.05)
    monkeypatch.setattr(config, "read_defaults", lambda folder: defaults)
    told = dict(doctor.model(POCKET))["sampling"]
    assert told == "drawn (temperature 0.6, top_k 20, repetition_penalty 1.05)"


def test_a_context_that_does_not_fit_is_shown() -> None:
    facts = dict(doctor.model(EngineSettings(model="pocket", blocks=4, max_context=2048)))
    assert "too few blocks" in facts["sessions that fit"]


def test_of_a_gpu_it_shows_the_sum_as_far_as_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class GPU(CpuDevice):
        def memory(self, *, anew: bool = False) -> Memory:
            return Memory(total=1 << 30, free=1000 << 20, held=0, peak=0)

    monkeypatch.setattr(build, "device_of", lambda device: GPU())
    asked = EngineSettings(model="pocket", device="cpu", dtype="float32", memory_utilization=0.5)
    facts = dict(doctor.model(asked))
    assert facts["memory"].startswith(
        "an estimate, ? is measured at start: weights 13.51 MiB + activations ? + graphs ? + context and others"
        " 24 MiB + KV 474.4 MiB = 511.9 MiB of at most 0.5 × 1.0 GiB"
    )
    assert facts["size of KV"].startswith(
        "0.5 of the device's memory (--gpu-memory-utilization), less weights"
    )
    assert (
        facts["KV on cpu"].startswith("at most 474.4 MiB") and "2,048 tokens in 128" in facts["largest step"]
    )
    assert dict(doctor.model(POCKET))["largest step"] == "2,048 tokens in 128 rows"
    monkeypatch.undo()
    assert dict(doctor.model(POCKET))["largest step"] == "512 tokens in 64 rows"


def test_the_machine_names_its_libraries() -> None:
    facts = dict(doctor.machine())
    assert (
        "torch" in facts["libraries"]
        and "not installed" not in facts["libraries"].split("torch")[1].split(",")[0]
    )
    assert facts["cpu"].split()[0].isdigit()


@pytest.mark.parametrize("name", ["x" * 200, "with [bold]brackets[/bold] and spaces " * 4])
def test_a_long_path_is_shown_whole(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / name.strip().replace("/", "|")
    folder.symlink_to(find_model("pocket"))
    assert doctor.run(EngineSettings(model=str(folder))) == 0
    shown = capsys.readouterr().out
    assert f"Model {folder}" in shown and f"folder              │ {folder} " in shown


def test_a_model_without_a_chat_template_is_said_to_complete_prompts(tmp_path: Path) -> None:
    tokenizer_of("qwen3").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert dict(doctor.language_facts(tmp_path))["chat template"].startswith("none: it completes prompts")


def test_a_folder_that_is_none_is_one_line_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(EngineSettings(model=str(tmp_path))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"holdfast: {tmp_path}: not a model folder: it has no config.json. Name the folder"
    )


def test_weights_that_are_missing_are_one_line_and_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((find_model("pocket") / "config.json").read_text())
    assert doctor.run(EngineSettings(model=str(tmp_path))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"holdfast: {tmp_path}: not a model folder: it has no weights, model.safetensors"


def test_no_name_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(EngineSettings(model="")) == 2
    assert capsys.readouterr().err == (
        "holdfast: no model is named: give a folder, a GGUF file, a hub id, or `pocket`\n"
    )


def test_it_tells_what_an_operator_should_know(tmp_path: Path) -> None:
    """A head beside tied embeddings counts, and is told."""
    folder = teach(make_toy("tiny", tmp_path))
    plain = dict(doctor.model(EngineSettings(model=str(folder), device="cpu", kv_bytes=1 << 20)))
    assert "note" not in plain
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.ones(256, 64)}, folder / "model.safetensors")
    told = dict(doctor.model(EngineSettings(model=str(folder), device="cpu", kv_bytes=1 << 20)))
    assert told["note"].startswith("lm_head.weight is not the embedding")
    assert number(told["weights"]) - number(plain["weights"]) == 256 * 64 * 4


def test_all_of_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(POCKET) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("cores", "KV per token", "chat template"))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"device": "meta"}, "device meta: not one of auto, cpu"),
        ({"device": "cuda:99"}, "device cuda:99: "),
        ({"kernels": "triton", "device": "cpu"}, "computes on a CUDA device, not on cpu"),
    ],
)
def test_what_the_engine_would_refuse_is_refused_in_one_line(
    asked: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.run(EngineSettings(model="pocket", **asked)) == 2  # type: ignore[arg-type]
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1


def test_the_kernels_it_names_are_those_that_read_such_kv() -> None:
    narrow = EngineSettings(model="pocket", device="cpu", kv_dtype="float8_e4m3fn")
    facts = dict(doctor.model(narrow))
    assert facts["kernels"].startswith("reference (") and "float8_e4m3fn" in facts["KV per token"]
