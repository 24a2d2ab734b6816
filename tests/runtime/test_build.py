"""From settings to an engine: the parts get the numbers that settings, model and memory agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from holdfast.benchmarks.toys import make_toy
from holdfast.kernels.backends import Backend
from holdfast.kernels.device import CpuDevice
from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.host.registration import Registration
from holdfast.runtime import build
from holdfast.runtime.build import load_engine
from holdfast.runtime.engine import Engine
from holdfast.runtime.errors import ModelUnreadable, PoolTooSmall, SettingsInvalid
from holdfast.runtime.link.engine_end import LoadedEngine
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import Generate, Open, Sampling, TokenLimits


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy("tiny", tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=300)


def load(model: Path | str, **changes: object) -> LoadedEngine:
    settings = EngineSettings(model=str(model), **{"device": "cpu", **changes})  # type: ignore[arg-type]
    return load_engine(settings, lambda done, what: None, Liveness())


def run(loaded: LoadedEngine, prompt: list[int], count: int) -> list[int]:
    loaded.engine.apply(Open(1, 1, b"", prompt))
    loaded.engine.apply(Generate(2, 1, Sampling(), TokenLimits(count)))
    tokens: list[int] = []
    while (step := loaded.engine.step()) is not None:
        tokens += [token for row in step.rows for token in row.tokens]
    return tokens


def test_by_default_the_model_s_context_and_a_share_of_memory(tiny: Path) -> None:
    hello = load(tiny).hello
    assert hello.max_context == 300 and hello.blocks * 16 >= 300
    assert hello.eos_ids == () and hello.model == str(tiny)


def test_a_pool_in_bytes(tiny: Path) -> None:
    hello = load(tiny, kv_bytes=20 * 8192 + 1).hello
    assert (hello.blocks, hello.block_bytes) == (20, 8192)


def test_a_pool_in_bytes_counts_the_blocks_of_all_groups(tmp_path: Path) -> None:
    loaded = load(make_toy("tiny", tmp_path, family="gemma3_text"), kv_bytes=20 * 16384 + 1, debug=True)
    assert (loaded.hello.blocks, loaded.hello.block_bytes) == (20, 16384)
    assert len(run(loaded, list(range(40)), 4)) == 4


def test_without_max_context_the_context_is_what_the_pool_holds(tiny: Path) -> None:
    assert load(tiny, blocks=5).hello.max_context == 80


def test_a_context_that_does_not_fit_the_pool_is_refused(tiny: Path) -> None:
    with pytest.raises(PoolTooSmall, match="max_context = 200"):
        load(tiny, blocks=5, max_context=200)


@pytest.mark.parametrize(
    "changes",
    [{"block_tokens": 0}, {"secret": b"short"}, {"device": "cuda:99"}, {"dtype": "int3"}, {"kv_bytes": 1}],
    ids=str,
)
def test_impossible_settings_are_named(tiny: Path, changes: dict[str, object]) -> None:
    with pytest.raises(SettingsInvalid):
        load(tiny, **changes)


def test_an_arena_that_does_not_fit_is_a_settings_error(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> DeviceArena:
        raise RuntimeError("can't allocate memory:\n you tried to allocate 8 PiB")

    monkeypatch.setattr(build, "DeviceArena", full)
    with pytest.raises(SettingsInvalid, match="10 blocks of 8192 bytes gets no memory: "):
        load(tiny, blocks=10)


def test_an_unreadable_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match="nothing"):
        load(tmp_path / "nothing")


def test_debug_poisons_the_arena_and_nothing_leaks_from_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[DeviceArena] = []

    class Kept(DeviceArena):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(build, "DeviceArena", Kept)
    plain, debug = load(tiny, blocks=19), load(tiny, blocks=19, debug=True)
    assert torch.isnan(made[1].kv).all() and not torch.isnan(made[0].kv).any()
    prompt = [n % 251 for n in range(70)]
    assert run(debug, prompt, 40) == run(plain, prompt, 40)
    assert isinstance(debug.engine, Engine)
    debug.engine.scheduler.audit()


def test_progress_is_reported_to_the_end(tiny: Path) -> None:
    told: list[tuple[float, str]] = []
    load_engine(
        EngineSettings(model=str(tiny), device="cpu", blocks=20),
        lambda done, what: told.append((done, what)),
        Liveness(),
    )
    done = [fraction for fraction, _ in told]
    assert done == sorted(done) and done[0] == 0.0 and done[-1] == 1.0
    assert any("loading" in what for _, what in told)


def test_an_engine_is_built_and_rehearsed_while_its_device_is_the_current_one(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles for, and launches on, whichever device is current: not always the first one."""
    current: list[torch.device] = []
    seen: dict[str, list[torch.device]] = {}

    class Recording(CpuDevice):
        def __init__(self, device: torch.device) -> None:
            self.device = device

        @contextmanager
        def active(self) -> Iterator[None]:
            current.append(self.device)
            yield
            current.pop()

    def choose_and_tell(*arguments: object) -> Backend:
        seen["kernels"] = list(current)
        return choose(*arguments)  # type: ignore[arg-type]

    choose, rehearse = build.choose, build.rehearse
    monkeypatch.setattr(build, "device_of", Recording)
    monkeypatch.setattr(build, "choose", choose_and_tell)
    monkeypatch.setattr(
        build,
        "rehearse",
        lambda *some, **more: (seen.update(steps=list(current)), rehearse(*some, **more))[1],
    )
    load(tiny)
    assert seen == {"kernels": [torch.device("cpu")], "steps": [torch.device("cpu")]} and not current


def test_the_host_tier_s_memory_is_pinned_before_kernels_run_and_given_back_at_the_end(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Registration, "begin", lambda self, tell: told.append("begun"))
    monkeypatch.setattr(build, "rehearse", lambda *_, **__: told.append("rehearsed"))
    monkeypatch.setattr(Registration, "close", lambda self: told.append("closed"))
    loaded = load(tiny, host_bytes=1 << 20)
    assert told == ["begun", "rehearsed"]
    loaded.leave()
    assert told[2:] == ["closed"]
