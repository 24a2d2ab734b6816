"""A model in Python without a server: what transformers computes, what a session says, in the shape of vLLM."""

from __future__ import annotations

import asyncio
import gc
import io
import math
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from holdfast.gateway import offline
from holdfast.gateway.batches.outputs import CompletionPiece
from holdfast.gateway.batches.progress_bars import COMPILES, LoadingBar
from holdfast.gateway.batches.prompts import conversation_of
from holdfast.runtime.errors import EngineDied, ModelUnreadable, SettingsInvalid
from holdfast.runtime.link.messages import Heartbeat, Phase
from holdfast.runtime.link.process import ChildEngine
from holdfast.runtime.settings import EngineSettings
from holdfast.sessions.conversation.items import FunctionCall, FunctionCallOutput, Message
from holdfast.sessions.errors import (
    EngineUnavailable,
    GrammarInvalid,
    GrammarStuck,
    InputInvalid,
    ItemInvalid,
    PromptTooLong,
    SamplingInvalid,
    TurnFailed,
)

POCKET = EngineSettings(model="pocket", blocks=1024, debug=True)
FP32: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "engine": POCKET}
GREEDY = SamplingParams(temperature=0, max_tokens=24)
STORY = "Tell me the story of the fox."
STORIES = [f"Tell me story {number} of the fox." for number in range(16)]
LONG = SamplingParams(temperature=0, max_tokens=400, min_tokens=400)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def get_weather(city: str) -> str:
    """The weather in a city, as JSON."""
    return '{"degrees": 7, "sky": "cloudy"}'


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("pocket", **FP32) as llm:
        yield llm


@pytest.fixture(scope="module")
async def async_llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM("pocket", **FP32) as llm:
        yield llm


def counted(llm: LLM, work: Callable[[], object]) -> dict[str, float]:
    """By how much the engine's counters rose."""
    before = llm.statistics()
    work()
    return {name: value - before.get(name, 0.0) for name, value in llm.statistics().items()}


def texts(outputs: list[RequestOutput]) -> list[list[str]]:
    return [[one.text for one in output.outputs] for output in outputs]


# --- the package --------------------------------------------------------------------------------------------


def run(code: str) -> str:
    """The output of a program; it must end by itself, without a word on stderr but of kernels."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stderr.replace(COMPILES, "").strip()) == (0, "")
    return done.stdout


def test_importing_the_package_loads_no_torch() -> None:
    run("import holdfast, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules")
    run("from holdfast import LLM, AsyncLLM, SamplingParams; import sys; assert 'torch' not in sys.modules")


def test_the_package_has_the_names_that_type_checkers_see() -> None:
    for name in holdfast.__all__:
        assert getattr(holdfast, name).__name__ == name and name in dir(holdfast)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        holdfast.nothing  # type: ignore[attr-defined]  # noqa: B018 - that mypy sees the error, too


def test_without_the_engines_packages_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['tokenizers'] = None; from holdfast import LLM"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: cannot import 'LLM'" in done.stderr and ".[engine]" in done.stderr


# --- what it computes ---------------------------------------------------------------------------------------


def test_generate_says_what_transformers_says(llm: LLM) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = llm.get_tokenizer()
    ids = tokenizer.apply_chat_template([user(STORY)], add_generation_prompt=True, return_dict=False)
    prompts = [*STORIES[:6], TextPrompt(prompt="The fox"), TokensPrompt(prompt_token_ids=ids), ids, [5, 6, 7]]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(Path(holdfast.__file__).parent / "runtime" / "pocket")
    model = model.to(torch.float32)
    assert len(outputs) == len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        text = (
            prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, dict) else None
        )
        given = tokenizer(text)["input_ids"] if text else output.prompt_token_ids
        assert output.prompt_token_ids == given and output.prompt == text and output.finished
        tensor = torch.tensor([given])
        with torch.inference_mode():
            expected = model.generate(
                tensor,
                attention_mask=torch.ones_like(tensor),
                max_new_tokens=24,
                do_sample=False,
                pad_token_id=0,
            )
        (completion,) = output.outputs
        assert completion.token_ids == expected[0, len(given) :].tolist()
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        ended = completion.token_ids[-1] in model.generation_config.eos_token_id
        assert completion.finish_reason == ("stop" if ended else "length") and completion.finished()
        assert completion.stop_reason is None
    assert [int(output.request_id) for output in outputs] == list(
        range(int(outputs[0].request_id), int(outputs[0].request_id) + len(outputs))
    )
    assert outputs[7].outputs == outputs[8].outputs


def test_chat_says_what_a_session_says(llm: LLM) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    conversations = []
    with llm.session(instructions="Be brief.") as chat:
        said = []
        for line in ("My name is Marisol.", "What is my name?", STORY):
            messages.append(user(line))
            conversations.append(list(messages))
            said.append(chat.say(line).finish().text)
            messages.append(assistant(said[-1]))
    assert "Marisol" in said[1]
    assert texts(llm.chat(conversations, use_tqdm=False)) == [[text] for text in said]
    (alone,) = llm.chat(conversations[1], use_tqdm=False)
    assert alone.outputs[0].text == said[1] and alone.outputs[0].finish_reason == "stop"
    rendered = llm.get_tokenizer().apply_chat_template(
        conversations[1], add_generation_prompt=True, tokenize=False
    )
    assert alone.prompt == rendered


def test_chat_shows_tools_and_reads_calls_as_a_session_does(llm: LLM) -> None:
    asked = "What is the weather in Oslo?"
    function = {"name": "get_weather", "description": "The weather in a city, as JSON."}
    function |= {"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    tools = [{"type": "function", "function": function}]
    (output,) = llm.chat([user(asked)], tools=tools, use_tqdm=False)
    (completion,) = output.outputs
    (call,) = completion.tool_calls
    assert (call.name, call.arguments, call.complete) == ("get_weather", '{"city": "Oslo"}', True)
    assert completion.text == "" and completion.token_ids
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    ]
    messages = [
        user(asked),
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": get_weather("Oslo")},
    ]
    (after,) = llm.chat(messages, tools=tools, use_tqdm=False)
    assert "cloudy" in after.outputs[0].text and not after.outputs[0].tool_calls
    tokenizer = llm.get_tokenizer()
    for told, given in ((output, messages[:1]), (after, messages)):
        ids = tokenizer.apply_chat_template(given, tools=tools, add_generation_prompt=True, return_dict=False)
        assert told.prompt_token_ids == ids
    (forced,) = llm.chat([user("Hello!")], tools=[get_weather], tool_choice="get_weather", use_tqdm=False)
    assert [call.name for call in forced.outputs[0].tool_calls] == ["get_weather"]
    (left,) = llm.chat([user(asked)], tools=tools, tool_choice="none", use_tqdm=False)
    assert not left.outputs[0].tool_calls and "{" not in left.outputs[0].text, "it writes no call at all"


def test_seeds_give_other_completions_and_the_same_ones_again(llm: LLM) -> None:
    params = SamplingParams(n=6, seed=11, max_tokens=16)
    first, second = (llm.generate(STORY, params, use_tqdm=False)[0].outputs for _ in range(2))
    assert first == second and [one.index for one in first] == list(range(6))
    assert len({one.text for one in first}) > 3
    alone = [SamplingParams(seed=11 + index, max_tokens=16) for index in range(6)]
    each = llm.generate([STORY] * 6, alone, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in each] == [one.token_ids for one in first]
    free = llm.generate([STORY] * 4, SamplingParams(max_tokens=16), use_tqdm=False)
    assert len({output.outputs[0].text for output in free}) > 1


def test_prompts_are_computed_together_and_completions_share_a_prompt(llm: LLM) -> None:
    whole = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    spent = counted(llm, lambda: llm.generate(STORIES, whole, use_tqdm=False))
    assert spent["sampled"] == 16 * 32 and spent["steps"] < 100
    long = "The fox and the crow met at the river. " * 60
    (single,) = llm.generate(long, GREEDY, use_tqdm=False)
    several = SamplingParams(n=4, seed=1, max_tokens=4)
    spent = counted(llm, lambda: llm.generate(f"No. 2. {long}", several, use_tqdm=False))
    assert spent["computed"] < 1.2 * len(single.prompt_token_ids)
    (again,) = llm.generate(long, GREEDY, use_tqdm=False)
    assert again.outputs == single.outputs and again.num_cached_tokens > 0.9 * len(again.prompt_token_ids)


def test_more_prompts_than_the_engine_admits(llm: LLM) -> None:
    prompts = [f"Story {number}." for number in range(300)]
    params = [SamplingParams(temperature=0, max_tokens=1 + number % 3) for number in range(300)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert all(
        len(output.outputs[0].token_ids) <= one.max_tokens
        for output, one in zip(outputs, params, strict=True)
        if one.max_tokens
    )
    assert llm.statistics()["link_generations"] == 0


# --- parameters ---------------------------------------------------------------------------------------------


def complete(llm: LLM, prompt: str = STORY, **fields: Any) -> CompletionOutput:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, **fields})
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def test_stops_say_what_ended_a_completion(llm: LLM) -> None:
    whole = complete(llm)
    assert whole.finish_reason == "length" and len(whole.token_ids) == 40
    stop = whole.text[20:24]
    cut = complete(llm, stop=[stop, "never said"])
    before = whole.text[: whole.text.index(stop)]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (before, "stop", stop)
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert complete(llm, stop=stop, include_stop_str_in_output=True).text == before + stop
    token = whole.token_ids[9]
    halted = complete(llm, stop_token_ids=[token])
    index = whole.token_ids.index(token)
    assert (halted.stop_reason, halted.finish_reason) == (token, "stop")
    assert halted.token_ids == whole.token_ids[: index + 1]
    late = complete(llm, stop_token_ids=[token], min_tokens=30)
    assert len(late.token_ids) >= 30
    ended = complete(llm, "Hello!", ignore_eos=False, max_tokens=None)
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)


def test_penalties_biases_and_bad_words_have_an_effect(llm: LLM) -> None:
    whole = complete(llm)
    token = whole.token_ids[0]
    assert complete(llm, logit_bias={token: -100.0}).token_ids[0] != token
    forced = complete(llm, logit_bias={token: 100.0}, max_tokens=3)
    assert forced.token_ids == [token] * 3
    assert complete(llm, bad_words=[[token]]).token_ids[0] != token
    word = whole.text.split()[1]
    assert f" {word} " not in complete(llm, bad_words=[word]).text
    for name in ("presence_penalty", "frequency_penalty"):
        assert complete(llm, **{name: 2.0}).token_ids != whole.token_ids
    assert complete(llm, repetition_penalty=2.0).token_ids != whole.token_ids
    narrow = complete(llm, temperature=2.0, seed=1, top_k=1)
    assert narrow.token_ids == whole.token_ids
    assert complete(llm, temperature=2.0, seed=1, top_p=1e-6).token_ids == whole.token_ids
    assert complete(llm, temperature=2.0, seed=1, min_p=1.0).token_ids == whole.token_ids
    assert complete(llm, temperature=2.0, seed=1).token_ids != whole.token_ids


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(Path(holdfast.__file__).parent / "runtime" / "pocket")
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=12, logprobs=3, ignore_eos=True)
    (output,) = llm.generate(STORY, params, use_tqdm=False)
    (completion,) = output.outputs
    ids, told = completion.token_ids, completion.logprobs
    assert told is not None and completion.cumulative_logprob is not None
    with torch.inference_mode():
        logits = model.to(torch.float32)(torch.tensor([output.prompt_token_ids + ids])).logits[0]
    scores = torch.log_softmax(logits[len(output.prompt_token_ids) - 1 : -1], -1)
    total = 0.0
    for token, row, found in zip(ids, scores, told, strict=True):
        assert next(iter(found)) == token
        assert math.isclose(found[token].logprob, float(row[token]), abs_tol=1e-3)
        best = torch.topk(row, 3).indices.tolist()
        assert sorted((one for one in found if found[one].rank), key=lambda one: found[one].rank or 0) == best
        assert found[token].decoded_token == llm.get_tokenizer().decode([token])
        total += found[token].logprob
    assert math.isclose(total, completion.cumulative_logprob, abs_tol=1e-6)
    assert complete(llm, logprobs=0, max_tokens=2).logprobs is not None
    plain = complete(llm, max_tokens=2)
    assert plain.logprobs is None and plain.cumulative_logprob is None


def scored_by_transformers(ids: list[int]) -> Any:
    """The log probabilities of each token behind the first one: ``[tokens - 1, vocabulary]``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(Path(holdfast.__file__).parent / "runtime" / "pocket")
    with torch.inference_mode():
        return torch.log_softmax(model.to(torch.float32)(torch.tensor([ids])).logits[0, :-1], -1)


def check_prompt(llm: LLM, output: RequestOutput, most: int) -> None:
    import torch

    ids, told = output.prompt_token_ids, output.prompt_logprobs
    assert told is not None and len(told) == len(ids) and told[0] is None
    seldom = 0
    for token, row, found in zip(ids[1:], scored_by_transformers(ids), told[1:], strict=True):
        assert found is not None and next(iter(found)) == token
        best = torch.topk(row, most).indices.tolist()
        assert set(found) == {token, *best}
        for one, score in found.items():
            assert math.isclose(score.logprob, float(row[one]), abs_tol=1e-3)
            assert score.rank == (best.index(one) + 1 if one in best else None)
            assert score.decoded_token == llm.get_tokenizer().decode([one])
        seldom += found[token].rank is None
    assert seldom, "a token that is not among the best is told, too"


@pytest.mark.parametrize("most", [0, 1, 4])
def test_prompt_logprobs_are_those_of_the_model(llm: LLM, most: int) -> None:
    """Also where the prefix cache has the prompt."""
    (plain,) = llm.generate(" ".join(STORIES), GREEDY, use_tqdm=False)
    assert plain.prompt_logprobs is None
    params = SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=most)
    prompts = [STORY, TokensPrompt(prompt_token_ids=plain.prompt_token_ids), [5]]
    short, long, one = llm.generate(prompts, params, use_tqdm=False)
    check_prompt(llm, short, most)
    check_prompt(llm, long, most)
    assert one.prompt_logprobs == [None]
    assert long.num_cached_tokens == 0 and long.outputs == plain.outputs
    (both,) = llm.generate(STORY, SamplingParams(prompt_logprobs=most, logprobs=2), use_tqdm=False)
    check_prompt(llm, both, most)
    assert both.outputs[0].logprobs is not None and all(len(one) >= 2 for one in both.outputs[0].logprobs)


def test_completions_of_one_prompt_score_it_once(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, n=4, prompt_logprobs=1)
    outputs: list[RequestOutput] = []
    rose = counted(llm, lambda: outputs.extend(llm.generate(" ".join(STORIES), params, use_tqdm=False)))
    check_prompt(llm, outputs[0], 1)
    length = len(outputs[0].prompt_token_ids)
    assert length > 100 and length <= rose["prefilled"] < length + 3 * 32, "the others find its blocks"


def test_a_conversation_has_prompt_logprobs(llm: LLM) -> None:
    messages = [user("My name is Marisol."), assistant("Hello!"), user("What is my name?")]
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2)
    (output,) = llm.chat(messages, params, use_tqdm=False)
    check_prompt(llm, output, 2)


def test_structured_outputs_are_followed(llm: LLM) -> None:
    import json
    import re

    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "required": ["age"]}
    schema["properties"] = {"age": {"type": "integer", "maximum": 9}}
    for given in (schema, json.dumps(schema)):
        text = complete(llm, structured_outputs=StructuredOutputsParams(json=given), ignore_eos=False).text
        assert json.loads(text)["age"] <= 9
    made = complete(llm, structured_outputs=StructuredOutputsParams(regex="[a-f]{3}-[0-9]{2}"))
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", made.text)
    assert complete(llm, structured_outputs=StructuredOutputsParams(choice=["red", "blue"])).text in (
        "red",
        "blue",
    )
    lark = StructuredOutputsParams(grammar='start: "a" "b"+ "c"')
    assert re.fullmatch("ab+c?", complete(llm, structured_outputs=lark).text)
    params = SamplingParams(
        temperature=0, structured_outputs=StructuredOutputsParams(choice=["Oslo", "Rome"])
    )
    assert llm.chat([user("Where?")], params, use_tqdm=False)[0].outputs[0].text in ("Oslo", "Rome")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 7}, "stop"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {1: 101}}, "logit_bias"),
        ({"bad_words": "red"}, "bad_words"),
        ({"stop_token_ids": 7}, "stop_token_ids"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_parameters_out_of_bounds_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValueError, match=param) as caught:
        SamplingParams(**fields)
    assert isinstance(caught.value, SamplingInvalid | GrammarInvalid) and caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "json_object": True},
        {"choice": []},
        {"choice": "red"},
        {"choice": [1]},
        {"json": "{"},
        {"json": "[]"},
        {"regex": ""},
        {"regex": 7},
        {"grammar": "start: %json {}"},
    ],
)
def test_structured_outputs_say_one_thing(fields: dict[str, Any]) -> None:
    with pytest.raises(GrammarInvalid, match=r"(?i)structured_outputs|grammar"):
        StructuredOutputsParams(**fields)


def test_parameters_are_checked_again_when_they_are_used(llm: LLM) -> None:
    params = SamplingParams(temperature=0)
    params.max_tokens = 2
    assert len(llm.generate(STORY, params, use_tqdm=False)[0].outputs[0].token_ids) == 2
    params.max_tokens = -2
    with pytest.raises(SamplingInvalid, match="max_tokens"):
        llm.generate(STORY, params, use_tqdm=False)
    with pytest.raises(SamplingInvalid, match="not a token id"):
        llm.generate(STORY, SamplingParams(stop_token_ids=[10**6]), use_tqdm=False)
    scored = SamplingParams(max_tokens=2)
    scored.prompt_logprobs = 21

    def refused() -> None:
        with pytest.raises(SamplingInvalid, match="prompt_logprobs"):
            llm.generate([STORY] * 3, [GREEDY, GREEDY, scored], use_tqdm=False)

    assert counted(llm, refused)["turns"] == 0


def test_the_models_own_parameters_are_the_default(llm: LLM) -> None:
    own = llm.get_default_sampling_params()
    assert own == SamplingParams(
        temperature=0.0, max_tokens=16
    )  # greedy, as its `generation_config.json` says
    assert (
        llm.generate(STORY, own, use_tqdm=False)[0].outputs == llm.generate(STORY, use_tqdm=False)[0].outputs
    )
    assert SamplingParams() == SamplingParams(
        n=1, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=16
    )


# --- what is refused, and what fails alone ------------------------------------------------------------------

PART = {"type": "image_url", "image_url": {"url": "x"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


@pytest.mark.parametrize(
    ("begin", "kind", "told"),
    [
        (lambda llm: llm.generate(["short", [9] * 2048]), PromptTooLong, r"prompts\[1\].*2048 tokens"),
        (lambda llm: llm.generate(["short", ""]), InputInvalid, r"prompts\[1\].*at least one token"),
        (lambda llm: llm.generate(["short", []]), InputInvalid, r"prompts\[1\].*at least one token"),
        (lambda llm: llm.generate([[1, 10**6]]), InputInvalid, r"prompts\[0\].*not a token id"),
        (lambda llm: llm.generate([[1, -1]]), InputInvalid, "-1 is not a token id"),
        (lambda llm: llm.generate([[1, 2.5]]), InputInvalid, "list of integers"),
        (lambda llm: llm.generate([[1, 2**70]]), InputInvalid, "list of integers"),
        (lambda llm: llm.generate([[1, "a"]]), InputInvalid, "list of integers"),
        (lambda llm: llm.generate(7), InputInvalid, "prompts are"),
        (lambda llm: llm.generate([None]), InputInvalid, r"prompts\[0\]"),
        (lambda llm: llm.generate({"text": "a"}), InputInvalid, "prompt_token_ids"),
        (lambda llm: llm.generate({"prompt": 7}), InputInvalid, "prompt_token_ids"),
        (lambda llm: llm.generate("\ud800"), InputInvalid, "surrogate"),
        (lambda llm: llm.generate("a", [GREEDY] * 2), SamplingInvalid, "1 prompts, but 2"),
        (lambda llm: llm.generate("a", {"n": 1}), SamplingInvalid, "sampling_params"),
        (lambda llm: llm.chat([]), ItemInvalid, "at least one message"),
        (lambda llm: llm.chat("Hello!"), ItemInvalid, "at least one message"),
        (lambda llm: llm.chat([{"role": "king", "content": "a"}]), ItemInvalid, r"\[0\].role"),
        (lambda llm: llm.chat([user("a"), {"role": "user"}]), ItemInvalid, "content"),
        (lambda llm: llm.chat([user("a"), {"role": "user", "content": [PART]}]), ItemInvalid, "image_url"),
        (lambda llm: llm.chat([[user("a")], [user("fox " * 4000)]]), PromptTooLong, r"messages\[1\]"),
        (
            lambda llm: llm.chat([user("a"), {"role": "tool", "tool_call_id": "x", "content": "b"}]),
            ItemInvalid,
            "waits for an output",
        ),
        (lambda llm: llm.chat([{"role": "tool", "content": "b"}]), ItemInvalid, "tool_call_id"),
        (lambda llm: llm.chat([{**user("a"), "tool_calls": [CALL]}]), ItemInvalid, "tool_calls"),
        (lambda llm: llm.chat([user("a")], tool_choice="unknown"), SamplingInvalid, "tool"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(
    llm: LLM, begin: Callable[[Any], object], kind: type[ValueError], told: str
) -> None:
    def refused() -> None:
        with pytest.raises(ValueError, match=told) as caught:
            begin(llm)
        assert isinstance(caught.value, kind)

    spent = counted(llm, refused)
    assert not spent["steps"] and not spent["turns"]


def test_messages_become_the_items_of_a_session() -> None:
    said = conversation_of(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "d"},
            {"role": "system", "content": "e"},
            {"role": "assistant", "content": ""},
        ]
    )
    assert said.preamble.instructions == "Be brief."
    shown: list[tuple[str, ...]] = []
    for item in said.items:
        match item:
            case Message():
                shown.append((item.role, item.text))
            case FunctionCall():
                shown.append((item.call_id, item.name, item.arguments))
            case FunctionCallOutput():
                shown.append((item.call_id, item.output))
    calls = [("call_1", "f", '{"a":1}'), ("call_1", "d")]
    assert shown == [("user", "a\nb"), ("assistant", "c"), *calls, ("system", "e"), ("assistant", "")]


def test_a_completion_that_fails_ends_alone(llm: LLM) -> None:
    stuck = SamplingParams(
        temperature=0, structured_outputs=StructuredOutputsParams(choice=["7"]), bad_words=["7"]
    )
    alone = llm.generate(STORIES[0], GREEDY, use_tqdm=False)
    first, second, third = llm.generate(
        [STORIES[0], "Seven", STORIES[0]], [GREEDY, stuck, GREEDY], use_tqdm=False
    )
    assert isinstance(second.outputs[0].error, GrammarStuck)
    assert second.outputs[0].finish_reason == "error" and second.finished
    assert first.outputs == third.outputs == alone[0].outputs


def test_a_mistake_in_reading_ends_one_completion(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.sessions.turn.reply_reader import ReplyReader

    read = ReplyReader.feed

    def broken(self: ReplyReader, *given: Any) -> Any:
        if self.request.min_output_tokens == 3:
            raise IndexError("planted")
        return read(self, *given)

    monkeypatch.setattr(ReplyReader, "feed", broken)
    params = [GREEDY, SamplingParams(temperature=0, min_tokens=3), GREEDY]
    outputs = [output.outputs[0] for output in llm.generate(STORIES[:3], params, use_tqdm=False)]
    assert [output.finish_reason == "error" for output in outputs] == [False, True, False]
    error = outputs[1].error
    assert isinstance(error, TurnFailed) and isinstance(error.__cause__, IndexError)
    assert llm.statistics()["link_generations"] == 0


# --- bars, sessions, ends -----------------------------------------------------------------------------------


class Bar:
    """What a bar is told, instead of tqdm."""

    def __init__(self, **shape: Any) -> None:
        self.shape, self.done, self.closed = shape, 0, False
        self.postfix = ""

    def update(self, count: int) -> None:
        self.done += count

    def close(self) -> None:
        self.closed = True


def test_a_bar_counts_the_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    bars: list[Bar] = []

    def made(**shape: Any) -> Bar:
        bars.append(Bar(**shape))
        return bars[0]

    llm.generate(STORIES[:3], SamplingParams(n=2, max_tokens=4), use_tqdm=made)
    (bar,) = bars
    assert (bar.shape["total"], bar.done, bar.closed) == (3, 3, True) and "tok/s" in bar.postfix
    llm.generate(STORIES[:3], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.chat([user("Hello!")])
    assert "Processed prompts: 100%" in capsys.readouterr().err


def test_loading_shows_a_bar_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    beats = [
        Heartbeat(Phase.LOADING, 1.0, "loading layers", 0.5),
        Heartbeat(Phase.COMPILING, 1.0, "compiling cores", 0.25),
        Heartbeat(Phase.IDLE, 1.0),
    ]
    for terminal in (True, False):
        shown = io.StringIO()
        monkeypatch.setattr(shown, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stderr", shown)
        bar = LoadingBar()
        for beat in beats:
            bar.heard(beat)
        told = ["loading layers:  50%" in shown.getvalue(), "compiling cores:  25%" in shown.getvalue()]
        assert told == [terminal] * 2 and (terminal or not shown.getvalue())


@pytest.mark.parametrize("kernel", ["compiling decoding", "compiling _attention_kernel"])
@pytest.mark.parametrize("terminal", [True, False])
def test_kernels_that_are_compiled_for_long_are_told_once(
    kernel: str, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's and Triton's."""
    shown, seconds = io.StringIO(), iter(range(100))
    monkeypatch.setattr(shown, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    bar = LoadingBar(lambda: float(next(seconds)))
    compiling, step = Heartbeat(Phase.COMPILING, 9.0, kernel), Heartbeat(Phase.STEPPING, 9.0)
    for beat in (compiling, *[step] * 20, *[compiling] * 4, *[Heartbeat(Phase.COMPILING, 9.0)] * 20):
        bar.heard(beat)
    assert COMPILES not in shown.getvalue(), "steps and what is read from disk do not count"
    for _ in range(20):
        bar.heard(compiling)
    assert shown.getvalue().count(f"{COMPILES}\n") == 1
    bar.close()


def test_a_session_on_the_same_engine(llm: LLM) -> None:
    with llm.session(instructions="Be brief.", tools=[get_weather], temperature=0) as chat:
        assert len(list(chat.say("My name is Marisol."))) > 1
        here = chat.last.response.output[-1]
        (fork,) = chat.fork()
        assert "cloudy" in chat.say("What is the weather in Oslo?").finish().text
        chat.rewind(here)
        assert "Marisol" in chat.say("What is my name?").finish().text
        llm.generate(STORIES[:2], GREEDY, use_tqdm=False)
        assert "Marisol" in fork.say("What is my name?").finish().text


def test_ctrl_c_ends_the_completions(llm: LLM) -> None:
    class Interrupting(Bar):
        def update(self, count: int) -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    lengths = [SamplingParams(temperature=0, max_tokens=1), LONG]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(STORIES[:2], lengths, use_tqdm=Interrupting)
    finally:
        signal.signal(signal.SIGINT, before)
    assert llm.generate(STORY, GREEDY, use_tqdm=False)[0].finished
    assert llm.statistics()["link_generations"] == 0


def test_a_program_that_closes_nothing_ends() -> None:
    code = """
import os
os.environ.pop("GOMP_SPINCOUNT", None)
from holdfast import LLM, SamplingParams
llm = LLM("pocket", dtype="float32", max_model_len=512)
assert os.environ["GOMP_SPINCOUNT"] == "20000"  # set before torch was imported
print(llm.generate("Hello!", SamplingParams(temperature=0), use_tqdm=False)[0].outputs[0].finish_reason)
"""
    assert run(code).strip() in ("stop", "length")


def test_a_process_of_its_own_and_a_seed_of_the_model(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[ChildEngine] = []

    class Watched(ChildEngine):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            engines.append(self)

    class Killing(Bar):
        def update(self, count: int) -> None:
            if not self.done:
                engines[0].kill()
            super().update(count)

    monkeypatch.setattr(offline, "ChildEngine", Watched)
    drawn = SamplingParams(max_tokens=12)
    threads = set(threading.enumerate())
    other = LLM("pocket", process=True, seed=5, **FP32)
    first = texts(other.generate(STORIES[:4], drawn, use_tqdm=False))
    greedy = other.generate(STORIES[:4], GREEDY, use_tqdm=False)
    assert texts(greedy) == texts(llm.generate(STORIES[:4], GREEDY, use_tqdm=False))
    scored = SamplingParams(temperature=0, max_tokens=400, min_tokens=400, prompt_logprobs=1)
    lengths = [SamplingParams(temperature=0, max_tokens=1), LONG, LONG, scored]
    outlived = other.generate(STORIES[:4], lengths, use_tqdm=Killing)
    assert texts(outlived) == texts(llm.generate(STORIES[:4], lengths, use_tqdm=False))
    check_prompt(llm, outlived[3], 1)
    engines.clear()
    del other  # which ends it, too
    gc.collect()
    assert ended(threads)
    again = LLM("pocket", seed=5, max_num_seqs=600, **FP32)
    assert texts(again.generate(STORIES[:4], drawn, use_tqdm=False)) == first
    completer = again._llm._completer
    assert completer is not None and completer.link.hello.max_sequences == 600
    assert repr(again) == "<LLM pocket, open>"
    again._portal.call(completer.link.fail, EngineDied("planted"))
    with pytest.raises(EngineUnavailable):
        again.generate(STORY, GREEDY, use_tqdm=False)
    again.close()
    again.close()
    assert repr(again) == "<LLM pocket, closed>"
    with pytest.raises(RuntimeError, match="cannot be used any more"):
        again.generate(STORY, GREEDY)
    with pytest.raises(RuntimeError, match="inside its `with` block"):
        again.session().__enter__()
    assert ended(threads)


def ended(before: set[threading.Thread]) -> bool:
    """Whether all threads but those ``before`` end by themselves."""
    others = set(threading.enumerate()) - before
    for thread in others:
        thread.join(10)
    return not any(thread.is_alive() for thread in others)


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match="no such folder"):
        LLM(str(tmp_path / "nothing"))
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        LLM("pocket", tensor_parallel_size=2)  # type: ignore[call-arg]
    assert "closed" in repr(AsyncLLM("pocket"))


def test_types_have_the_names_that_the_command_line_has() -> None:
    AsyncLLM("pocket", dtype="half", kv_cache_dtype="fp8", quantization="int4")
    with pytest.raises(SettingsInvalid, match="quantization is 'awq', not one of int8, int4, fp8"):
        AsyncLLM("pocket", quantization="awq")
    with pytest.raises(SettingsInvalid, match="dtype is 'int7', not one of auto, float32"):
        AsyncLLM("pocket", dtype="int7")


# --- with async ---------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_pieces_come_as_they_are_written(async_llm: AsyncLLM) -> None:
    params = SamplingParams(n=2, seed=4, max_tokens=24, stop=["zebra"])
    stream = async_llm.generate(STORIES[:3], params)
    with pytest.raises(LookupError):
        stream.outputs  # noqa: B018
    read: dict[tuple[int, int], str] = {}
    count = 0
    async for piece in stream:
        read[piece.prompt, piece.completion] = read.get((piece.prompt, piece.completion), "") + piece
        count += 1
    outputs = stream.outputs
    assert count > 6 * 3 and texts(outputs) == [
        [read.get((at, number), "") for number in range(2)] for at in range(3)
    ]
    assert texts(await async_llm.generate(STORIES[:3], params)) == texts(outputs)


@pytest.mark.anyio
async def test_chat_streams_what_it_returns(async_llm: AsyncLLM) -> None:
    messages = [user("My name is Marisol."), assistant("Hello!"), user("What is my name?")]
    pieces = [piece async for piece in async_llm.chat(messages)]
    assert len(pieces) > 1 and all(isinstance(piece, CompletionPiece) for piece in pieces)
    (output,) = await async_llm.chat(messages)
    assert "".join(pieces) == output.outputs[0].text and "Marisol" in output.outputs[0].text


@pytest.mark.anyio
async def test_prompt_logprobs_stand_in_the_outputs_of_a_stream(async_llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=2, ignore_eos=True)
    stream = async_llm.generate(STORIES[:2], params)
    assert [piece async for piece in stream]
    whole = await async_llm.generate(STORIES[:2], params)
    for one, other in zip(stream.outputs, whole, strict=True):
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        assert [list(found or ()) for found in one.prompt_logprobs] == [
            list(found or ()) for found in other.prompt_logprobs
        ]
        assert len(one.prompt_logprobs) == len(one.prompt_token_ids)


@pytest.mark.anyio
async def test_calls_run_side_by_side_and_a_session_beside_them(async_llm: AsyncLLM) -> None:
    async def talk() -> str:
        async with async_llm.session(temperature=0) as chat:
            await chat.say("My name is Marisol.").text()
            (fork,) = await chat.fork()
            return await fork.say("What is my name?").text()

    calls = [asyncio.ensure_future(_outputs(async_llm, story)) for story in STORIES[:6]]
    text, *each = await asyncio.gather(talk(), *calls)
    assert "Marisol" in text
    together = await async_llm.generate(STORIES[:6], GREEDY)
    assert each == [output.outputs for output in together]


async def _outputs(llm: AsyncLLM, prompt: str) -> list[CompletionOutput]:
    return (await llm.generate(prompt, GREEDY))[0].outputs


@pytest.mark.anyio
async def test_what_is_left_or_cancelled_ends_in_the_engine(async_llm: AsyncLLM) -> None:
    async for _ in async_llm.generate(STORIES[:3], LONG):
        break
    gc.collect()
    started = asyncio.Event()
    completions = async_llm.generate(STORIES[:3], LONG)

    async def read() -> None:
        async for _ in completions:
            started.set()

    reading = asyncio.create_task(read())
    await started.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    waiting = asyncio.ensure_future(_outputs(async_llm, STORY))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await async_llm.generate(STORY, GREEDY)  # its verbs come behind those that close
    assert (await async_llm.statistics())["link_generations"] == 0
    with pytest.raises(LookupError):
        completions.outputs  # noqa: B018


@pytest.mark.anyio
async def test_completions_that_are_never_read_warn(async_llm: AsyncLLM) -> None:
    async_llm.generate(STORY, GREEDY)
    with pytest.warns(RuntimeWarning, match="never awaited"):
        gc.collect()
