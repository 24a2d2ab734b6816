"""From settings to an engine: the parts get the numbers that settings, model and memory agree on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.benchmarks.toys import make_toy
from holdfast.kernels.backends import Backend
from holdfast.kernels.device import CpuDevice, Memory
from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.host.registration import Registration
from holdfast.runtime import build
from holdfast.runtime.build import load_engine
from holdfast.runtime.engine import Engine
from holdfast.runtime.errors import ModelUnreadable, PoolTooSmall, SettingsInvalid
from holdfast.runtime.execution.runner import TorchRunner
from holdfast.runtime.execution.warmup import rehearse
from holdfast.runtime.link.engine_end import LoadedEngine
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.model.load import load_model
from holdfast.runtime.settings import EngineSettings, SchedulerSettings, StepSize
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
    loaded = load(
        make_toy("tiny", tmp_path, family="gemma3_text"), kv_bytes=20 * 16384 + 1, max_context=320, debug=True
    )
    assert (loaded.hello.blocks, loaded.hello.block_bytes) == (80, 4096), "four groups"
    assert len(run(loaded, list(range(40)), 4)) == 4


def test_without_max_context_the_context_is_what_the_pool_holds(tiny: Path) -> None:
    assert load(tiny, blocks=5).hello.max_context == 80


def test_own_settings_go_before_defaults_and_the_model_limits_the_context(tiny: Path) -> None:
    def resolved(**changes: Any) -> SchedulerSettings:
        engine = load(tiny, blocks=100, **changes).engine
        assert isinstance(engine, Engine)
        return engine.scheduler.settings

    usual = resolved()
    assert (usual.depth, usual.max_context, usual.watermark_blocks) == (1, 300, 1)
    own = resolved(depth=2, max_context=64, max_sequences=3, watermark=0.25)
    assert (own.depth, own.max_context, own.max_sequences, own.watermark_blocks) == (2, 64, 3, 25)
    with pytest.raises(SettingsInvalid, match="--max-context 4096 is more than the 300 tokens"):
        resolved(max_context=4096)


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


@pytest.mark.parametrize(
    ("head_dim", "capability", "block_tokens", "told"),
    [
        (72, (9, 0), 16, r"head_dim 72 \(supported: 64, 80, 96, 128, 256\)"),
        (64, (7, 5), 16, r"compute capability 7\.5 \(supported: 8\.0 and later\)"),
        (64, (9, 0), 8, r"block size 8 \(supported: 16, 32, 64\)"),
    ],
)
def test_what_the_kernels_of_a_gpu_cannot_compute_is_named_with_what_they_can(
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    capability: tuple[int, int],
    block_tokens: int,
    told: str,
) -> None:
    monkeypatch.setattr(build, "device_named", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    settings = EngineSettings(model="m", device="cuda", kernels="triton", block_tokens=block_tokens)
    with pytest.raises(SettingsInvalid, match=told):
        build.named_backend(settings, "bfloat16", head_dim)


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
    list(debug.engine.scheduler.audit_in_slices())


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


MIB = 1 << 20
BLOCK = 8192  # bytes of one of ``tiny``


class World:
    """A device with memory of its own, of which the readings are made up: 64 MiB, of which weights take 3, the
    largest step 7, graphs 4, others 2. ``told``: what was done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[Any] = []
        self.readings = deque(
            Memory(64 * MIB, free, held, peak)
            for free, held, peak in (
                (59 * MIB, 3 * MIB, 3 * MIB),
                (52 * MIB, 10 * MIB, 10 * MIB + 2 * BLOCK),
                *(
                    (free, 14 * MIB, 14 * MIB)
                    for free in (52 * MIB, 51 * MIB, 51 * MIB, 51 * MIB, 101 * MIB // 2)
                ),
            )
        )
        self.errors: list[Exception] = []
        here, rehearse = self, build.rehearse

        class Reading(CpuDevice):
            def memory(self, *, anew: bool = False) -> Memory:
                return here.readings.popleft() if len(here.readings) > 1 else here.readings[0]

        class Kept(DeviceArena):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                here.told.append(("arena", len(self.kv)))

        def rehearsed(runner: Any, *some: Any, **more: Any) -> list[Exception]:
            self.told.append(("rehearsed", more["largest"]))
            return rehearse(runner, *some, kernels=False) + self.errors

        monkeypatch.setattr(build, "device_of", lambda device: Reading())
        monkeypatch.setattr(build, "DeviceArena", Kept)
        monkeypatch.setattr(build, "rehearse", rehearsed)
        monkeypatch.setattr(build, "tell_compiling", lambda begun, ended: None)

        def capture(
            runner: TorchRunner,
            sizes: list[StepSize],
            progress: Callable[[StepSize], None],
            *,
            now: bool = True,
        ) -> None:
            self.told.append(("captured", len(sizes), now))
            for one in sizes if now else ():
                progress(one)

        monkeypatch.setattr(TorchRunner, "capture", capture)

    def load(self, model: Path, **changes: Any) -> LoadedEngine:
        settings = EngineSettings(model=str(model), **{"device": "cpu", "capture_sizes": (1, 4), **changes})
        return load_engine(settings, lambda done, what: None, Liveness())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_kv_gets_what_the_largest_step_and_the_graphs_leave(tiny: Path, gpu: World) -> None:
    loaded = gpu.load(tiny, memory_utilization=0.75)
    blocks = (48 - 3 - 7 - 4 - 2) * MIB // BLOCK
    assert loaded.hello.blocks == blocks and loaded.hello.max_sequences == 128
    assert gpu.told == [
        *(("arena", 2), ("rehearsed", (2048, 128)), ("captured", 4, True)),
        *(("arena", blocks), ("rehearsed", None), ("captured", 9, True)),
    ]
    assert loaded.hello.memory == (
        "weights 3 MiB + activations 7 MiB + graphs 4 MiB + context and others 2 MiB + KV 32 MiB = 48 MiB"
        " of at most 0.75 × 64 MiB"
    )
    assert len(run(loaded, list(range(40)), 4)) == 4


def test_graphs_that_are_captured_when_needed_count_too(tiny: Path, gpu: World) -> None:
    gpu.load(tiny, capture_lazily=True)
    assert [told[1:] for told in gpu.told if told[0] == "captured"] == [(4, True), (9, False)]


def test_without_graphs_none_are_captured(tiny: Path, gpu: World) -> None:
    gpu.load(tiny, enforce_eager=True)
    assert [told[1:] for told in gpu.told if told[0] == "captured"] == [(0, True)]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (
            {"kv_bytes": 60 * MIB},
            "kv_bytes = 60 MiB, as asked, does not fit: weights 3 MiB + activations 7 MiB",
        ),
        ({"blocks": 10_000}, "blocks = 10,000, as asked, does not fit: "),
        ({"memory_utilization": 0.2}, "there is no room for KV: "),
        ({"max_context": 300, "blocks": 5}, "a sequence of max_context = 300 tokens takes 19 blocks"),
    ],
)
def test_kv_that_does_not_fit_is_refused_with_all_parts(
    tiny: Path, gpu: World, changes: dict[str, Any], cause: str
) -> None:
    with pytest.raises(SettingsInvalid) as refused:
        gpu.load(tiny, **changes)
    assert refused.value.message.startswith(cause)
    assert "graphs 4 MiB" in refused.value.message and "--max-step-tokens" in refused.value.message


def test_a_largest_step_that_does_not_fit_is_refused_with_what_to_lower(tiny: Path, gpu: World) -> None:
    gpu.errors = [ValueError("no kernel"), torch.OutOfMemoryError("CUDA out of memory")]
    with pytest.raises(
        SettingsInvalid, match=r"a step of 64 tokens in 64 rows .* --max-step-tokens, --max-seq"
    ):
        gpu.load(tiny, max_step_tokens=64)
    assert not any(told[0] == "captured" for told in gpu.told)


def test_graphs_that_do_not_fit_are_refused_with_what_to_lower(
    tiny: Path, gpu: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(TorchRunner, "capture", capture)
    with pytest.raises(SettingsInvalid, match=r"CUDA out of memory.* --cudagraph-capture-sizes"):
        gpu.load(tiny)


def test_the_largest_steps_are_computed_without_a_fault(tiny: Path) -> None:
    model = load_model(tiny, "cpu")
    runner = TorchRunner(model.decoder, DeviceArena(model.kv_groups(16)[0], build.TRIAL_BLOCKS))
    assert rehearse(runner, 16, 300, kernels=True, largest=StepSize(70, 12)) == []
