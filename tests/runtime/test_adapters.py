"""Adapters in an engine: tokens as with merged weights, KV never shared across adapters, slots that are too
few, loading and unloading while turns run."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.benchmarks.toys import make_adapter, make_toy
from holdfast.runtime.build import load_engine
from holdfast.runtime.errors import AdapterInvalid, SettingsInvalid
from holdfast.runtime.link.engine_end import LoadedEngine
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.model.adapter import AdapterMaps, read_adapter
from holdfast.runtime.model.load import load_model
from holdfast.runtime.settings import EngineSettings, LoraModule
from holdfast.runtime.verbs import (
    AnyVerb,
    Fork,
    Generate,
    LoadAdapter,
    Open,
    Opening,
    Refusal,
    Sampling,
    Statistics,
    TokenLimits,
    UnloadAdapter,
    VerbReply,
)
from holdfast.tests.runtime.model.feeding import transformers_model

PROMPT = [(7 * at + 3) % 256 for at in range(40)]
NAMES = ("a", "b", "c", "d", "e")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy("tiny", tmp_path_factory.mktemp("models") / "base", noise=0.3)


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(place / name, base, rank=4 + seed, seed=seed) for seed, name in enumerate(NAMES)
    }


def greedy(base: Path, adapter: Path | None, prompt: list[int], count: int) -> list[int]:
    """What transformers says in fp32, with the adapter's product added to each weight."""
    model = transformers_model(base)
    if adapter is not None:
        from safetensors.torch import load_file

        tensors = load_file(adapter / "adapter_model.safetensors")
        weights = dict(model.named_parameters())
        for name, a in tensors.items():
            if name.endswith(".lora_A.weight"):
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                b = tensors[name.replace(".lora_A.", ".lora_B.")]
                weights[f"{module}.weight"].data += b @ a  # alpha is the rank
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return said[0, len(prompt) :].tolist()


class Talker:
    """An engine with these adapters, and its digests by name."""

    def __init__(self, base: Path, folders: dict[str, Path], **settings: object) -> None:
        modules = tuple(f"{name}={folder}" for name, folder in folders.items())
        told = {
            "device": "cpu",
            "enable_lora": True,
            "lora_modules": modules,
            "debug": True,
            "blocks": 64,
            "host_bytes": 1 << 20,
        }
        self.loaded: LoadedEngine = load_engine(
            EngineSettings(model=str(base), **{**told, **settings}),  # type: ignore[arg-type]
            lambda done, what: None,
            Liveness(),
        )
        self.engine = self.loaded.engine
        self.digests = {one.name: one.digest for one in self.loaded.hello.adapters}
        self.said: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.requests = 0

    def apply(self, verb: AnyVerb) -> VerbReply | Refusal:
        answer = self.engine.apply(verb)
        while answer is None:
            if not self.step():  # wait as the link does: the reader needs the interpreter
                time.sleep(min(self.engine.due() or 0.0, 0.01))
            found = [one for one in self.loaded.answers() if one.request == verb.request]
            answer = found[0] if found else None
        return answer

    def begin(
        self, seq: int, name: str = "", prompt: list[int] = PROMPT, count: int = 12
    ) -> VerbReply | Refusal:
        self.requests += 1
        digest = self.digests[name] if name else b""
        opening = Opening(b"salt", adapter=digest)
        limits = TokenLimits(count)
        return self.apply(Generate(self.requests, seq, Sampling(), limits, tokens=prompt, opening=opening))

    def step(self) -> bool:
        step = self.engine.step()
        for row in step.rows if step else ():
            assert row.error is None, row.error
            self.said.setdefault(row.seq, []).extend(row.tokens)
            if row.work is not None:
                self.cached[row.seq] = row.work.resident
        return step is not None

    def run(self) -> dict[int, list[int]]:
        while self.step():
            pass
        return self.said

    def count(self, name: str) -> float:
        answer = self.apply(Statistics(0))
        assert isinstance(answer, VerbReply) and answer.statistics is not None
        return answer.statistics[name]

    def load(self, name: str, folder: Path) -> VerbReply | Refusal:
        self.requests += 1
        answer = self.apply(LoadAdapter(self.requests, name, str(folder)))
        if isinstance(answer, VerbReply) and answer.adapter is not None:
            self.digests[name] = answer.adapter.digest
        return answer

    def unload(self, name: str) -> VerbReply | Refusal:
        self.requests += 1
        return self.apply(UnloadAdapter(self.requests, name))


@pytest.fixture(params=["cpu", "reference"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu":
        pytest.importorskip("numba")
    return request.param


def test_tokens_are_those_of_merged_weights(base: Path, folders: dict[str, Path], kernels: str) -> None:
    """Five adapters and none in one batch, each greedy for itself."""
    talker = Talker(base, folders, kernels=kernels)
    for seq, name in enumerate(["", *NAMES], 1):
        talker.begin(seq, name)
    said = talker.run()
    expected = {
        seq: greedy(base, folders[name] if name else None, PROMPT, 12)
        for seq, name in enumerate(["", *NAMES], 1)
    }
    assert said == expected
    assert len({tuple(tokens) for tokens in said.values()}) == 6


def test_more_adapters_than_slots_take_turns(base: Path, folders: dict[str, Path], kernels: str) -> None:
    """Two slots for five adapters and a turn without one: all end, and say what they say alone."""
    talker = Talker(base, folders, kernels=kernels, max_loras=2, max_cpu_loras=5)
    for seq, name in enumerate([*NAMES, "", *NAMES], 1):
        talker.begin(seq, name, PROMPT[seq:], 9)
    said = talker.run()
    for seq, name in enumerate([*NAMES, "", *NAMES], 1):
        assert said[seq] == greedy(base, folders[name] if name else None, PROMPT[seq:], 9)
    assert talker.count("adapter_slots_held") == 2 and talker.count("adapter_swaps") >= 5


def test_kv_is_never_shared_across_adapters(base: Path, folders: dict[str, Path]) -> None:
    talker = Talker(base, folders)
    for seq, name in enumerate(["", "a", "b"], 1):
        talker.begin(seq, name, count=2)
        talker.run()
        assert talker.cached[seq] == 0
    for seq, name in enumerate(["", "a", "b"], 4):
        talker.begin(seq, name, count=2)
        talker.run()
        assert talker.cached[seq] == 32 and talker.said[seq] == talker.said[seq - 3]


def test_without_an_adapter_keys_are_those_of_an_engine_without_any(
    base: Path, folders: dict[str, Path]
) -> None:
    model = load_model(base, "cpu")
    digest = read_adapter(folders["a"], AdapterMaps(model.config, model.decoder.dtype)).digest
    assert model.namespace() == model.namespace(b"") != model.namespace(digest)


def test_a_fork_has_its_parents_adapter_and_kv(base: Path, folders: dict[str, Path]) -> None:
    talker = Talker(base, folders)
    talker.begin(1, "a", count=4)
    talker.run()
    talker.apply(Fork(90, 1, [2]))
    talker.apply(Generate(91, 2, Sampling(), TokenLimits(8)))
    talker.run()
    assert talker.said[1] + talker.said[2] == greedy(base, folders["a"], PROMPT, 12)
    assert talker.cached[2] >= 32


def test_adapters_come_and_go_while_turns_run(base: Path, folders: dict[str, Path]) -> None:
    """A turn with an adapter that is unloaded ends as if it were there; the next is refused, until it is loaded
    again."""
    talker = Talker(base, {"a": folders["a"]}, max_loras=1, max_cpu_loras=2)
    talker.begin(1, "a", count=20)
    talker.step()
    assert isinstance(talker.load("b", folders["b"]), VerbReply)
    talker.begin(2, "b", count=5)
    assert isinstance(talker.unload("a"), VerbReply)
    refused = talker.begin(3, "a")
    assert isinstance(refused, Refusal) and refused.code == "adapter_unknown"
    said = talker.run()
    assert said[1] == greedy(base, folders["a"], PROMPT, 20)
    assert said[2] == greedy(base, folders["b"], PROMPT, 5)
    later = talker.apply(Generate(70, 1, Sampling(), TokenLimits(3)))
    assert isinstance(later, Refusal) and later.code == "adapter_unknown"
    assert isinstance(talker.load("a", folders["a"]), VerbReply)
    talker.begin(4, "a", count=5)
    assert talker.run()[4] == said[1][:5]


def test_what_cannot_be_loaded_is_refused_and_nobody_else_is_touched(
    base: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    talker = Talker(base, {"a": folders["a"]}, max_loras=1, max_cpu_loras=2, max_lora_rank=8)
    talker.begin(1, "a")
    broken = make_adapter(tmp_path / "broken", base)
    told = {}
    for name, folder in (("a", folders["b"]), ("c", broken), ("d", tmp_path / "none")):
        answer = talker.load(name, folder)
        assert isinstance(answer, Refusal)
        told[name] = answer.code, answer.message
    assert told["a"] == ("adapter_exists", "adapter 'a' is loaded already: unload it first")
    assert told["c"][0] == "adapter_invalid" and "rank 16 is above --max-lora-rank 8" in told["c"][1]
    assert told["d"] == ("adapter_invalid", f"{tmp_path / 'none'}: not a folder")
    answer = talker.unload("x")
    assert isinstance(answer, Refusal) and answer.code == "adapter_unknown"
    assert isinstance(talker.load("b", folders["b"]), VerbReply)
    answer = talker.load("c", folders["c"])
    assert isinstance(answer, Refusal) and answer.code == "adapter_limit"
    assert talker.run()[1] == greedy(base, folders["a"], PROMPT, 12)
    plain = Talker(base, {}, enable_lora=False)
    answer = plain.load("a", folders["a"])
    assert isinstance(answer, Refusal) and "start it with --enable-lora" in answer.message


def test_one_adapter_under_two_names_is_held_once(base: Path, folders: dict[str, Path]) -> None:
    talker = Talker(base, {"a": folders["a"], "again": folders["a"]})
    assert talker.digests["a"] == talker.digests["again"]
    talker.begin(1, "a", count=2)
    talker.run()
    talker.begin(2, "again", count=2)
    talker.run()
    assert talker.cached[2] == 32 and talker.count("adapter_slots_held") == 1
    talker.unload("a")
    talker.begin(3, "again", count=2)
    assert talker.run()[3] == talker.said[1]


def test_an_engine_that_follows_another_leaves_out_what_is_gone(
    base: Path, folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Talker(base, {"a": folders["a"]})
    gone = LoraModule("gone", str(tmp_path / "gone"), b"1" * 32)
    other = LoraModule("other", str(folders["b"]), b"2" * 32)
    kept = LoraModule("a", str(folders["a"]), first.digests["a"])
    second = Talker(base, {}, again=(gone, other, kept))
    assert second.digests == first.digests
    assert "gone is not loaded again" in caplog.text and "not those of before" in caplog.text
    with pytest.raises(AdapterInvalid, match="not a folder"):
        Talker(base, {"gone": tmp_path / "gone"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_modules": ("a=b",)}, "--lora-modules needs --enable-lora"),
        ({"enable_lora": True, "lora_modules": ("ab",)}, "--lora-modules 'ab': name=path is expected"),
        ({"enable_lora": True, "lora_modules": ("=b",)}, "an adapter's name has 1 to 256"),
        ({"enable_lora": True, "lora_modules": ("a=b", "a=c")}, "'a' is named twice"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, "--max-cpu-loras 3 is less than"),
        ({"enable_lora": True, "max_lora_rank": 257}, "max_lora_rank is 257, more than 256"),
        (
            {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "lora_modules": ("a=b", "c=d")},
            "--lora-modules names 2 adapters, --max-cpu-loras allows 1",
        ),
    ],
)
def test_settings_that_contradict_themselves(settings: dict, words: str) -> None:
    with pytest.raises(SettingsInvalid, match=words):
        EngineSettings(model="pocket", **settings)


def test_a_thousand_loads_and_unloads_leave_nothing(base: Path, folders: dict[str, Path]) -> None:
    """No adapter, slot, tensor or open file stays, and what is loaded last says what it said first."""
    talker = Talker(base, {}, max_loras=2, max_cpu_loras=2)
    first: dict[str, list[int]] = {}

    def held() -> tuple[int, int]:
        gc.collect()
        tensors = sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
        return tensors, len(os.listdir("/proc/self/fd"))

    before = (0, 0)
    for number in range(1000):
        name = NAMES[number % len(NAMES)]
        assert isinstance(talker.load(name, folders[name]), VerbReply)
        if number % 50 < len(NAMES):
            talker.begin(number + 1, name, count=3)
            said = talker.run().pop(number + 1)
            assert first.setdefault(name, said) == said
        assert isinstance(talker.unload(name), VerbReply)
        if number == 100:
            talker.run()
            before = held()
    talker.run()
    assert talker.count("adapters") == talker.count("adapter_slots_held") == 0
    assert held() == before


def test_an_open_sequence_is_computed_before_its_turn(base: Path, folders: dict[str, Path]) -> None:
    """Idle sequences with adapters are prefilled, also where the slots are too few for all."""
    talker = Talker(base, folders, max_loras=1, max_cpu_loras=5, idle_stretch=0.0)
    for seq, name in enumerate(NAMES, 1):
        talker.apply(Open(100 + seq, seq, b"", PROMPT, adapter=talker.digests[name]))
    talker.run()
    for seq, name in enumerate(NAMES, 1):
        answer = talker.apply(Generate(200 + seq, seq, Sampling(), TokenLimits(6)))
        assert isinstance(answer, VerbReply) and answer.state is not None and answer.state.computed == 39
        talker.run()
        assert talker.said[seq] == greedy(base, folders[name], PROMPT, 6)
