"""The engine says what transformers says: greedy tokens, fp32, on every path through the steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from holdfast.benchmarks.pocket.skills import conversations
from holdfast.benchmarks.toys import make_toy
from holdfast.kernels.backends import Needs, choose
from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.keys import BlockHasher
from holdfast.kvstore.pool import BlockPool
from holdfast.runtime.engine import Engine
from holdfast.runtime.execution.runner import TorchRunner
from holdfast.runtime.model.decoder import Decoder
from holdfast.runtime.model.load import LoadedModel, load_model
from holdfast.runtime.scheduler.scheduler import Scheduler
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import Generate, Open, Refusal, Sampling, TokenLimits, Work

BLOCK = 16
CHUNKS = (1, 7, 16, 64)


@dataclass(frozen=True)
class Case:
    """A prompt and what transformers' ``generate`` adds to it."""

    prompt: list[int]
    expected: list[int]


@dataclass(frozen=True)
class Subject:
    """A model and its cases."""

    model: LoadedModel
    cases: list[Case]


def reference(folder: Path, prompts: Iterable[Sequence[int]], new: int, eos: tuple[int, ...]) -> list[Case]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cases = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=list(eos) or None,
                pad_token_id=0,
            )
        cases.append(Case(list(prompt), out[0, len(prompt) :].tolist()))
    return cases


def pocket_prompts(folder: Path, count: int) -> list[list[int]]:
    """Unseen conversations, rendered by transformers up to a point where the assistant is to speak."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    skills = ("recall_short", "tools", "repeat", "not_told", "recall_long")
    prompts = []
    for number in range(count):
        skill = skills[number % len(skills)]
        (conversation,) = conversations(skill, 1, seed=9000 + number)
        messages = (
            [{"role": "system", "content": conversation.instructions}] if conversation.instructions else []
        )
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn.user})
            if turn is not conversation.turns[-1]:
                messages.append({"role": "assistant", "content": turn.expect or "OK."})
        prompts.append(
            tokenizer.apply_chat_template(
                messages, tools=conversation.tools or None, add_generation_prompt=True, return_dict=False
            )
        )
    return prompts


@pytest.fixture(scope="module")
def pocket() -> Subject:
    model = load_model("pocket", "cpu", "float32")
    return Subject(model, reference(model.folder, pocket_prompts(model.folder, 16), 48, model.config.eos_ids))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = make_toy("toy-9m", tmp_path_factory.mktemp("toy"), seed=0, projection_scale=3.0)
    generator = torch.Generator().manual_seed(7)
    lengths = [1, 2, 15, 16, 17, 31, 33, 48, 64, 65, 100, 128, 130, 150, 200, 257]
    prompts = [torch.randint(0, 4096, (length,), generator=generator).tolist() for length in lengths]
    cases = reference(folder, prompts, BLOCK + 1, ())
    assert len({token for case in cases for token in case.expected}) > 100, "the toy must vary"
    return Subject(load_model(folder, "cpu", "float32"), cases)


def build(model: LoadedModel, *, blocks: int = 1024, **numbers: int) -> Engine:
    """An engine with a poisoned arena: a slot read before it is written shows."""
    groups = model.kv_groups(BLOCK)
    settings = SchedulerSettings(
        blocks=blocks,
        windows=tuple(group.window for group in groups),
        vocab_size=model.config.vocab_size,
        block_tokens=BLOCK,
        **{
            "max_context": min(blocks * BLOCK // len(groups), 4096),
            "max_sequences": 16,
            "max_step_tokens": 512,
            **numbers,
        },
    )
    arena = DeviceArena(groups[0], blocks, "cpu")
    arena.poison(range(blocks))
    hasher = BlockHasher(b"0" * 32, BLOCK)
    scheduler = Scheduler(settings, BlockPool(blocks, debug=True), hasher, model.namespace())
    return Engine(scheduler, TorchRunner(model.decoder, arena), debug=True)


def run(
    engine: Engine,
    model: LoadedModel,
    cases: Sequence[Case],
    *,
    first: int = 0,
    disturb: Callable[[Work | None], None] = lambda work: None,
) -> list[list[int]]:
    """All cases at once; ``disturb`` is called after each row."""
    said: dict[int, list[int]] = {}
    for seq, case in enumerate(cases, first):
        limits = TokenLimits(len(case.expected), model.config.eos_ids)
        for verb in (Open(0, seq, b"", case.prompt), Generate(0, seq, Sampling(), limits)):
            reply = engine.apply(verb)
            assert not isinstance(reply, Refusal), reply
        said[seq] = []
    while (step := engine.step()) is not None:
        for row in step.rows:
            assert row.error is None, row.error
            said[row.seq] += row.tokens
            disturb(row.work)
    return list(said.values())


def expected(cases: Sequence[Case]) -> list[list[int]]:
    return [case.expected for case in cases]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Two KV groups: layers with a window of 24 tokens and layers without."""
    folder = make_toy("tiny", tmp_path_factory.mktemp("windowed"), family="gemma2", noise=0.3)
    generator = torch.Generator().manual_seed(7)
    lengths = [1, 16, 24, 25, 40, 65, 100, 150]
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]
    cases = reference(folder, prompts, 16, ())
    assert len({token for case in cases for token in case.expected}) > 30, "the toy must vary"
    model = load_model(folder, "cpu", "float32")
    assert [group.window for group in model.kv_groups(BLOCK)] == [24, None]
    return Subject(model, cases)


SUBJECTS = ("pocket on cpu", "toy on cpu", "toy on reference", "windowed on cpu", "windowed on reference")
CELLS = [
    pytest.param(name, chunk, marks=() if chunk == 7 or "windowed" in name else beside)
    for name in SUBJECTS
    for beside in [pytest.mark.slow if name == "toy on reference" else pytest.mark.more]
    for chunk in CHUNKS
]
"""The windowed model is small; the others take long in every chunk."""


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    """A model on a backend; ``cpu`` is what the engine takes by default."""
    name, _, backend = request.param.split()
    loaded: Subject = request.getfixturevalue(name)
    kernels = choose(backend, torch.device("cpu"), Needs(torch.float32)).kernels
    decoder = Decoder(loaded.model.config, loaded.model.decoder.weights, kernels)
    return replace(loaded, model=replace(loaded.model, decoder=decoder))


def test_alone(subject: Subject) -> None:
    engine = build(subject.model)
    said = [run(engine, subject.model, [case], first=seq)[0] for seq, case in enumerate(subject.cases)]
    assert said == expected(subject.cases)


def test_in_a_mixed_batch_of_16(subject: Subject) -> None:
    engine = build(subject.model)
    assert run(engine, subject.model, subject.cases) == expected(subject.cases)


@pytest.mark.parametrize(("subject", "chunk"), CELLS, indirect=["subject"])
def test_prefill_in_chunks_alone(subject: Subject, chunk: int) -> None:
    """Every second case, and the others with the next size of a chunk."""
    short = [case for case in subject.cases if len(case.prompt) <= 150 * chunk]
    cases = short[CHUNKS.index(chunk) % 2 : 12 : 2]
    engine = build(subject.model, max_sequences=1, max_step_tokens=chunk)
    said = [run(engine, subject.model, [case], first=seq)[0] for seq, case in enumerate(cases)]
    assert said == expected(cases)


@pytest.mark.parametrize(("subject", "chunk"), CELLS, indirect=["subject"])
def test_prefill_in_chunks_beside_others(subject: Subject, chunk: int) -> None:
    """All sixteen decode in the end; the chunk is what is left beside their reserved tokens."""
    cases = subject.cases[:16]
    engine = build(subject.model, max_step_tokens=15 + chunk)
    assert run(engine, subject.model, cases) == expected(cases)


def test_with_prefix_hits(subject: Subject) -> None:
    engine, cases = build(subject.model), subject.cases[:16]
    assert run(engine, subject.model, cases) == expected(cases)
    before = engine.statistics()
    assert run(engine, subject.model, cases, first=100) == expected(cases)
    after = engine.statistics()
    reusable = sum((len(case.prompt) - 1) // BLOCK * BLOCK for case in cases)
    assert after["adopted"] - before["adopted"] >= reusable
    assert after["computed"] - before["computed"] < before["computed"]


def test_with_forced_preemptions(subject: Subject) -> None:
    """A pool of little more than the longest case, and every few steps one loses its KV: all say the same."""
    cases = subject.cases[:16]
    longest = max(len(case.prompt) + len(case.expected) for case in cases)
    engine = build(
        subject.model, blocks=(-(-longest // BLOCK) + 3) * subject.model.decoder.groups, max_context=longest
    )
    steps = itertools.count()

    def disturb(work: Work | None) -> None:
        recomputed.append(work.recomputed if work else 0)
        step = next(steps)
        if step % 5 == 0:
            engine.scheduler.evict(step // 5 % len(cases))

    recomputed: list[int] = []
    assert run(engine, subject.model, cases, disturb=disturb) == expected(cases)
    assert sum(recomputed) > 0
