"""8-bit KV: scales change only what is stored, the error is bounded, invalid formats are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.benchmarks.toys import make_toy
from holdfast.kvstore.keys import BlockHasher
from holdfast.runtime.build import load_engine
from holdfast.runtime.errors import SettingsInvalid
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.model.kv_format import KVFormat
from holdfast.runtime.model.load import load_model
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import Generate, Open, Sampling, TokenLimits
from holdfast.tests.runtime.model.feeding import Fed, prompts

E4M3 = "float8_e4m3fn"
FAMILIES = ("qwen3", "llama", "qwen2", "phi3", "gemma2", "gemma3_text", "olmo2", "granite")


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_alone_change_no_bit_of_the_logits(family: str, tmp_path: Path) -> None:
    """They are powers of two: what is left out when KV is stored comes back exactly."""
    folder = make_toy("tiny", tmp_path, family=family, noise=0.3)
    plain, scaled = load_model(folder, "cpu"), load_model(folder, "cpu", kv=KVFormat("auto", 0.25, 8.0))
    first, second = (Fed(model, prompts(40)).in_chunks(16) for model in (plain, scaled))
    assert torch.equal(first.logits(), second.logits())
    one, other, there = first.arena, second.arena, ~first.arena.isnan()
    assert torch.equal(one[:, :, 0][there[:, :, 0]], other[:, :, 0][there[:, :, 0]] * 0.25)
    assert torch.equal(one[:, :, 1][there[:, :, 1]], other[:, :, 1][there[:, :, 1]] * 8.0)


def test_the_pocket_model_with_8_bit_kv_generates_nearly_the_same() -> None:
    """How far the log probabilities of its own words move: a few hundredths in the mean."""
    prompt = list(range(20, 420, 3))
    first, second = (load_model("pocket", "cpu", "float32", kv=kv) for kv in (KVFormat(), KVFormat(E4M3)))
    exact, rough = Fed(first, [torch.tensor(prompt)]), Fed(second, [torch.tensor(prompt)])
    rough.arena = torch.zeros(rough.arena.shape).to(torch.float8_e4m3fn)
    logs = [fed.in_chunks(64).logits().log_softmax(-1) for fed in (exact, rough)]
    likely = logs[0].argmax(-1, keepdim=True)
    moved = (logs[0].gather(-1, likely) - logs[1].gather(-1, likely)).abs().mean().item()
    assert 0 < moved < 0.1, moved


def test_an_engine_runs_with_8_bit_kv(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_toy("tiny", tmp_path)
    loaded = {}
    for kind in ("auto", E4M3):
        settings = EngineSettings(
            model=str(folder), device="cpu", kv_dtype=kind, blocks=64, host_bytes=0, debug=True
        )
        loaded[kind] = load_engine(settings, lambda done, what: None, Liveness())
    narrow, wide = loaded[E4M3], loaded["auto"]
    assert (narrow.hello.kv_dtype, narrow.hello.dtype, wide.hello.kv_dtype) == (E4M3, "float32", "float32")
    assert narrow.hello.block_bytes * 4 == wide.hello.block_bytes
    assert narrow.hello.kernels == "reference" and f"does not read KV of {E4M3}" in caplog.text
    engine = narrow.engine
    engine.apply(Open(1, 1, b"", list(range(40))))
    engine.apply(Generate(2, 1, Sampling(), TokenLimits(6)))
    said = []
    while (step := engine.step()) is not None:
        said += [token for row in step.rows for token in row.tokens]
    assert len(said) == 6


def test_each_format_has_a_record_space_of_its_own_under_the_same_keys(tmp_path: Path) -> None:
    folder = make_toy("tiny", tmp_path)
    formats = [KVFormat(), KVFormat(E4M3), KVFormat(E4M3, 0.5), KVFormat(E4M3, 1.0, 0.5)]
    models = [load_model(folder, "cpu", kv=kv) for kv in formats]
    assert len({model.namespace() for model in models}) == 1
    hasher = BlockHasher(bytes(16), 16)
    assert len({hasher.space(b"name", model.kv_groups(16)) for model in models}) == len(formats)


@pytest.mark.parametrize(
    ("kv", "words"),
    [
        (("float8_e5m2",), "kv_dtype is 'float8_e5m2', not one of auto, float8_e4m3fn"),
        ((E4M3, 0.3), r"scale of keys is 0\.3, not a power of two"),
        ((E4M3, 1.0, -2.0), r"scale of values is -2\.0"),
        ((E4M3, float("nan")), "scale of keys is nan"),
        ((E4M3, 1.0, 2.0**17), "scale of values"),
    ],
)
def test_invalid_formats_are_refused_by_name(kv: tuple[str | float, ...], words: str) -> None:
    with pytest.raises(SettingsInvalid, match=words):
        KVFormat(*kv)  # type: ignore[arg-type]
    dtype, *scales = (*kv, 1.0, 1.0)[:3]
    with pytest.raises(SettingsInvalid, match=words):
        EngineSettings(model="pocket", kv_dtype=dtype, kv_scales=tuple(scales))  # type: ignore[arg-type]
