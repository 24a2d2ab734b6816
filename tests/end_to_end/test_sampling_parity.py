"""Sampling through whole engines on the pocket model: transformers' tokens; draws that repeat on every path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.keys import BlockHasher
from holdfast.kvstore.pool import BlockPool
from holdfast.runtime.engine import Engine
from holdfast.runtime.execution.runner import TorchRunner
from holdfast.runtime.link.client import EngineLink
from holdfast.runtime.model.folder import find_model
from holdfast.runtime.model.load import LoadedModel, load_model
from holdfast.runtime.scheduler.scheduler import Scheduler
from holdfast.runtime.settings import EngineSettings, SchedulerSettings
from holdfast.runtime.thread import ThreadEngine
from holdfast.runtime.verbs import (
    Finish,
    Generate,
    Open,
    Opening,
    Refusal,
    Row,
    Sampling,
    TokenLimits,
    TokenLogprob,
)

BLOCK, NEW = 16, 40
DEPTHS = [1, 2]
"""2: each step is planned before the tokens it goes on from are known."""

WARM = [
    Sampling(2.0, seed=1),
    Sampling(1.8, 40, 0.95, seed=2, min_p=0.02),
    Sampling(1.9, seed=3, typical_p=0.9, repetition_penalty=1.2),
    Sampling(1.7, seed=4, presence_penalty=0.8, frequency_penalty=0.4),
    Sampling(2.0, seed=5, bad_words=((11,), (40, 41)), logit_bias=((50, 3.0),)),
    Sampling(repetition_penalty=1.3, logprobs=2),
]


@dataclass
class Said:
    """What a sequence was given by the engine."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None


@pytest.fixture(scope="module")
def pocket() -> LoadedModel:
    return load_model("pocket", "cpu", "float32")


@pytest.fixture(scope="module")
def reference(pocket: LoadedModel):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(pocket.folder, dtype=torch.float32).eval()


LINES = (
    "Tell me a story about a fox and a river.",
    "My name is Marisol and I live in Oslo.",
    "What is the weather in Rome? Please answer in a long sentence.",
    "Repeat after me: one two three four five six seven.",
    "Who are you, and what can you do for me today?",
    "Count the days of the week, then the months of the year, one after the other.",
)


@lru_cache
def prompts(count: int) -> list[list[int]]:
    """Chat prompts of various lengths, as transformers renders them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(find_model("pocket"))
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": line}] * (1 + at % 3), add_generation_prompt=True, return_dict=False
        )
        for at, line in enumerate(LINES[:count])
    ]


def build(model: LoadedModel, depth: int, blocks: int = 256) -> Engine:
    groups = model.kv_groups(BLOCK)
    settings = SchedulerSettings(
        blocks=blocks,
        windows=tuple(group.window for group in groups),
        vocab_size=model.config.vocab_size,
        block_tokens=BLOCK,
        max_context=min(2048, blocks * BLOCK // len(groups)),
        max_sequences=16,
        max_step_tokens=128,
        depth=depth,
    )
    arena = DeviceArena(groups[0], blocks, "cpu")
    arena.poison(range(blocks))
    pool = BlockPool(blocks, debug=True)
    scheduler = Scheduler(settings, pool, BlockHasher(b"0" * 32, BLOCK), model.namespace())
    return Engine(scheduler, TorchRunner(model.decoder, arena), debug=True)


def say(
    engine: Engine,
    turns: Sequence[tuple[list[int], Sampling, TokenLimits]],
    *,
    first: int = 0,
    disturb: Callable[[int], None] = lambda step: None,
    generated_from: int = 0,
) -> list[Said]:
    """All turns at once, to their ends."""
    said: dict[int, Said] = {}
    for seq, (prompt, sampling, limits) in enumerate(turns, first):
        for verb in (Open(0, seq, b"", prompt), Generate(0, seq, sampling, limits, generated_from)):
            reply = engine.apply(verb)
            assert not isinstance(reply, Refusal), reply
        said[seq] = Said()
    steps = 0
    while (step := engine.step()) is not None:
        for row in step.rows:
            assert row.error is None, row.error
            said[row.seq].tokens += row.tokens
            said[row.seq].logprobs += row.logprobs or []
            said[row.seq].finish = row.finish
        steps += 1
        disturb(steps)
    return list(said.values())


@pytest.mark.parametrize(
    ("sampling", "least", "asked"),
    [
        (Sampling(repetition_penalty=3.0), 0, {"repetition_penalty": 3.0}),
        (Sampling(repetition_penalty=1.3), NEW, {"repetition_penalty": 1.3, "min_new_tokens": NEW}),
        (Sampling(repetition_penalty=0.7), NEW, {"repetition_penalty": 0.7, "min_new_tokens": NEW}),
        (Sampling(), 15, {"min_new_tokens": 15}),
        (
            Sampling(logit_bias=((390, 13.0), (1529, -8.0))),
            0,
            {"sequence_bias": [[[390], 13.0], [[1529], -8.0]]},
        ),
    ],
    ids=["repetition", "repetition, longer", "repetition below 1", "at least", "bias"],
)
def test_greedy_tokens_are_those_of_generate(
    pocket: LoadedModel, reference, sampling: Sampling, least: int, asked: dict[str, object]
) -> None:
    eos = pocket.config.eos_ids
    expected = [transformers_says(reference, prompt, eos, **asked) for prompt in prompts(6)]
    plain = said_plainly(reference, eos)
    assert sum(one != other for one, other in zip(expected, plain, strict=True)) >= 3, "it must matter"
    turns = [(prompt, sampling, TokenLimits(NEW, eos, least)) for prompt in prompts(6)]
    for depth in DEPTHS:
        assert [said.tokens for said in say(build(pocket, depth), turns)] == expected, depth


def test_bad_words_are_those_of_generate(pocket: LoadedModel, reference) -> None:
    """Banned are pairs that transformers would say, so each must be avoided where it would be completed."""
    eos = pocket.config.eos_ids
    turns, expected = [], []
    for prompt, plain in zip(prompts(6), said_plainly(reference, eos), strict=True):
        words = [plain[at : at + 2] for at in range(0, len(plain) - 1, 3)] + [[plain[0]]]
        words = [word for word in words if word[-1] not in eos]
        expected.append(transformers_says(reference, prompt, eos, bad_words_ids=words))
        assert expected[-1] != plain
        turns.append((prompt, Sampling(bad_words=tuple(map(tuple, words))), TokenLimits(NEW, eos)))
    for depth in DEPTHS:
        assert [said.tokens for said in say(build(pocket, depth), turns)] == expected, depth


@lru_cache
def said_plainly(model, eos: tuple[int, ...]) -> list[list[int]]:
    return [transformers_says(model, prompt, eos) for prompt in prompts(6)]


def transformers_says(model, prompt: list[int], eos: tuple[int, ...], **asked: object) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=list(eos),
            pad_token_id=0,
            **asked,
        )
    return out[0, len(prompt) :].tolist()


def test_seeds_repeat_alone_in_a_batch_after_preemption_and_begun_again(pocket: LoadedModel) -> None:
    turns = [(prompt, how, TokenLimits(NEW, (), 5)) for prompt, how in zip(prompts(6), WARM, strict=True)]
    alone = [say(build(pocket, 1), [turn])[0].tokens for turn in turns]
    assert all(len(set(one)) > 8 for one in alone)
    for depth in DEPTHS:
        engine = build(pocket, depth)
        assert [said.tokens for said in say(engine, turns)] == alone

        def disturb(step: int, engine: Engine = engine) -> None:
            if step % 4 == 0:
                engine.scheduler.evict(100 + step // 4 % 6)

        assert [said.tokens for said in say(engine, turns, first=100, disturb=disturb)] == alone
        for cut in (1, 17):  # as after a crash: the rest of the reply, said by another engine
            again = [
                (prompt + one[:cut], how, limits)
                for (prompt, how, limits), one in zip(turns, alone, strict=True)
            ]
            rest = say(build(pocket, depth), again, generated_from=cut)
            assert [one[:cut] + said.tokens for one, said in zip(alone, rest, strict=True)] == alone


def test_another_seed_says_something_else(pocket: LoadedModel) -> None:
    (prompt,) = prompts(1)
    said = say(build(pocket, 1), [(prompt, Sampling(6.0, seed=seed), TokenLimits(12)) for seed in range(8)])
    assert len({tuple(one.tokens) for one in said}) == 8


def test_logprobs_are_log_softmax_of_the_model(pocket: LoadedModel, reference) -> None:
    hows = [
        Sampling(logprobs=5),
        Sampling(1.2, seed=3, top_k=50, logprobs=20),
        Sampling(logprobs=0, repetition_penalty=2.0),
    ]
    turns = [(prompt, how, TokenLimits(12)) for prompt, how in zip(prompts(3), hows, strict=True)]
    for (prompt, how, _), said in zip(turns, say(build(pocket, 2), turns), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + said.tokens])).logits[0]
        plain = logits[len(prompt) - 1 : -1].log_softmax(-1)
        told = torch.tensor([one.logprob for one in said.logprobs])
        assert torch.allclose(told, plain.gather(-1, torch.tensor(said.tokens)[:, None])[:, 0], atol=1e-4)
        for one, row in zip(said.logprobs, plain, strict=True):
            best = row.topk(how.logprobs or 0).values
            assert torch.allclose(torch.tensor([value for _, value in one.top]), best, atol=1e-4)


@pytest.mark.parametrize("how", [Sampling(), WARM[0]], ids=["greedy", "drawn"])
def test_stop_ids_and_the_least_number_of_tokens(pocket: LoadedModel, how: Sampling) -> None:
    (prompt,) = prompts(1)
    free = say(build(pocket, 1), [(prompt, how, TokenLimits(NEW))])[0].tokens
    stop = free[6]
    assert stop not in free[:6]
    for depth in DEPTHS:
        cut, later = say(
            build(pocket, depth),
            [
                (prompt, how, TokenLimits(NEW, (stop,))),
                (prompt, how, TokenLimits(NEW, (stop,), 20)),
            ],
        )
        assert (cut.tokens, cut.finish) == (free[:7], Finish.STOP)
        assert stop not in later.tokens[:20]
        if how == Sampling():  # what may not come changes no choice of the likeliest, but it may a draw
            assert later.tokens[:6] == free[:6]
        rest = say(
            build(pocket, depth),
            [(prompt + later.tokens[:9], how, TokenLimits(NEW, (stop,), 20))],
            generated_from=9,
        )
        assert later.tokens[:9] + rest[0].tokens == later.tokens


async def choices(
    link: EngineLink, prompt: list[int], sampling: Sampling, limits: TokenLimits, n: int
) -> Any:
    """The rows of ``n`` generations of ``prompt``, computed once; number i has seed ``sampling.seed + i``."""
    first = await link.generate(Opening(), sampling, limits, tokens=prompt)
    row = await anext(first)  # once the first token is sampled the prompt has KV to share
    made: list[list[Row]] = [[row]]
    opened = [first.state.seq, *await link.fork(first.state.seq, n - 1, len(prompt))]
    seeds = [msgspec.structs.replace(sampling, seed=sampling.seed + number) for number in range(1, n)]
    others = [await link.generate(seq, how, limits) for seq, how in zip(opened[1:], seeds, strict=True)]
    made[0] += [row async for row in first]
    made += [[row async for row in other] for other in others]
    for seq in opened:
        await link.close(seq)
    return made


@pytest.mark.anyio
async def test_choices_share_the_prompt_and_are_what_their_seeds_say_alone(pocket: LoadedModel) -> None:
    prompt, how = prompts(6)[5], Sampling(2.0, seed=8, logprobs=1)
    alone = [
        say(build(pocket, 1), [(prompt, Sampling(2.0, seed=8 + number), TokenLimits(10))])[0].tokens
        for number in range(4)
    ]
    async with ThreadEngine(EngineSettings(model="pocket", dtype="float32", device="cpu")) as link:
        before = await link.statistics()
        made = await choices(link, prompt, how, TokenLimits(10), 4)
        after = await link.statistics()
    assert [[token for row in rows for token in row.tokens] for rows in made] == alone
    for rows in made:
        assert rows[-1].finish is Finish.LENGTH and sum(len(row.logprobs or ()) for row in rows) == 10
    computed = after["computed"] - before["computed"]
    assert computed <= len(prompt) + 4 * 10, "the prompt is computed once"
    assert after["sequences"] == before["sequences"]


def test_the_pocket_model_is_greedy_by_default(pocket: LoadedModel) -> None:
    from holdfast.runtime.model.config import read_defaults
    from holdfast.runtime.verbs import SamplingDefaults

    assert read_defaults(Path(pocket.folder)) == SamplingDefaults()
