"""Routes of Chat Completions and of tokenizing, as a client sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.sessions.tools.forms import ReasoningForm
from holdfast.tests.gateway.messages.messages_stage import Stage, stage
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio

CHAT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/tokenize", "/detokenize"
USER = {"role": "user", "content": "Think."}
THOUGHT = {"role": "assistant", "content": "two", "reasoning_content": "one"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def chat(on: Stage, *messages: Any, **fields: Any) -> Any:
    answer = await on.http.post(CHAT, json={"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def deltas(answer: Any) -> list[Any]:
    """What the chunks of a stream tell of choice 0."""
    chunks = [line.removeprefix("data: ") for line in answer.text.strip().split("\n\n")]
    assert chunks[-1] == "[DONE]"
    return [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks[:-1]]


async def test_reasoning_is_told_apart_from_the_reply() -> None:
    async with stage("one</think>two", "one</think>two", reasoning=ReasoningForm.OPENED) as on:
        message = (await chat(on, USER)).json()["choices"][0]["message"]
        streamed = deltas(await chat(on, {**USER, "content": "Once more."}, stream=True))
    assert (message["reasoning_content"], message["content"]) == ("one", "two")
    kinds = [next(iter(delta)) for delta in streamed if "role" not in delta and delta]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes first"
    for name, text in (("reasoning_content", "one"), ("content", "two")):
        assert "".join(delta.get(name) or "" for delta in streamed) == text


async def test_a_reply_without_reasoning_has_no_such_field() -> None:
    async with stage("two", "two") as on:
        assert "reasoning_content" not in (await chat(on, USER)).json()["choices"][0]["message"]
        streamed = deltas(await chat(on, {**USER, "content": "Once more."}, stream=True))
    assert not any("reasoning_content" in delta for delta in streamed)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", None])
async def test_reasoning_that_is_sent_back_changes_nothing(name: str | None) -> None:
    """The conversation goes on in its session, and the prompt has no word of it."""
    async with stage("one</think>two", "three</think>four", reasoning=ReasoningForm.OPENED) as on:
        await chat(on, USER)
        back = {"role": "assistant", "content": "two", **({} if name is None else {name: "another thought"})}
        answer = (await chat(on, USER, back, {**USER, "content": "More."})).json()
        assert answer["choices"][0]["message"]["content"] == "four"
        (live,) = on.service.sessions()
        assert answer["kv"]["new"] < answer["usage"]["prompt_tokens"]
        assert "another thought" not in str(live.session.history.items())


async def test_texts_are_tokenized_as_the_tokenizer_does() -> None:
    backend = ours("chatml").backend
    async with stage() as on:
        for text in ("Hello there!", "", " ünïcode \n<|im_start|>user", "日本語 \U0001f600"):
            for special in (True, False):
                body = {"prompt": text, "add_special_tokens": special}
                told = (await on.http.post(TOKENIZE, json=body)).json()
                ids = backend.encode(text, add_special_tokens=special).ids
                assert told == {"count": len(ids), "max_model_len": on.link.hello.max_context, "tokens": ids}
                back = (await on.http.post(DETOKENIZE, json={"tokens": ids})).json()
                assert back == {"prompt": backend.decode(ids, skip_special_tokens=False)}
                assert back["prompt"].endswith(text)


@pytest.mark.parametrize("tools", [[], [TOOL]])
async def test_a_conversation_is_tokenized_to_the_prompt_of_its_turn(tools: list[Any]) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    async with stage("two") as on:
        told = (await on.http.post(TOKENIZE, json={"messages": messages, "tools": tools})).json()
        answer = (await chat(on, *messages, **({"tools": tools} if tools else {}))).json()
        assert told["count"] == len(told["tokens"]) == answer["usage"]["prompt_tokens"]
        (held,) = on.link.held.values()
        assert held.tokens[: told["count"]] == told["tokens"]
        text = (await on.http.post(DETOKENIZE, json={"tokens": told["tokens"]})).json()["prompt"]
        assert text.endswith("<|im_start|>assistant\n") and "Be brief." in text and "Think." in text
        assert ("add" in text) is bool(tools)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TOKENIZE, {}, None),
        (TOKENIZE, {"prompt": "a", "messages": [USER]}, None),
        (DETOKENIZE, {"tokens": [-1]}, "tokens[0]"),
        (DETOKENIZE, {"tokens": [2**31 - 2]}, "tokens"),
        (DETOKENIZE, {"tokens": "abc"}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused(path: str, body: Any, param: str | None) -> None:
    async with stage() as on:
        answer = await on.http.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
