"""`echo` with `logprobs` on `/v1/completions`: the prompt's log probabilities, by a real model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from holdfast.gateway.server import serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.execution import sampler
from holdfast.runtime.settings import EngineSettings

pytestmark = pytest.mark.anyio
PROMPT = "Once upon a time there was a fox. My name is Marisol, and the weather in Rome is sunny. " * 6


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    settings = EngineSettings(model="pocket", max_step_tokens=64, dtype="float32")
    async with (
        serving(GatewaySettings(port=0), settings) as server,
        httpx2.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        yield client


async def complete(http: httpx2.AsyncClient, **fields: Any) -> Any:
    body = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_prompt_has_the_scores_that_its_tokens_had_when_they_were_sampled(
    http: httpx2.AsyncClient,
) -> None:
    """Over several chunks and several slices of logits, and although the prefix cache has the prompt."""
    given = (await http.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
    assert len(given) > max(64, sampler.SCORED_AT_ONCE), "several chunks"
    told = await complete(http, prompt=given, logprobs=3, max_tokens=40)
    choice = told["choices"][0]
    said = (await http.post("/tokenize", json={"prompt": choice["text"], "add_special_tokens": False})).json()
    whole = await complete(http, prompt=[*given, *said["tokens"]], logprobs=3, echo=True, max_tokens=1)
    scores = whole["choices"][0]["logprobs"]
    texts, known = scores["tokens"], choice["logprobs"]
    assert texts[len(given) : len(given) + len(known["tokens"])] == known["tokens"], "it is read as written"
    assert len(texts) == len(scores["token_logprobs"]) == len(given) + len(said["tokens"]) + 1
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert all(isinstance(value, float) and value <= 0 for value in scores["token_logprobs"][1:])
    behind = slice(len(given), len(given) + len(known["tokens"]))
    assert scores["token_logprobs"][behind] == pytest.approx(known["token_logprobs"], abs=1e-4)
    for one, other in zip(scores["top_logprobs"][behind], known["top_logprobs"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "all of it is computed"
    again = await complete(http, prompt=[*given, *said["tokens"]], logprobs=3, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "and can be used again"
    assert again["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
        scores["token_logprobs"][-1:], abs=1e-4
    )


@pytest.mark.parametrize("logprobs", [0, 2])
async def test_a_stream_tells_the_prompt_with_its_scores_first(
    http: httpx2.AsyncClient, logprobs: int
) -> None:
    asked = {"prompt": ["My name is Marisol.", "Hello"], "echo": True, "logprobs": logprobs, "n": 2}
    whole = await complete(http, **asked)
    body = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "stream": True, **asked}
    answer = await http.post("/v1/completions", json=body)
    chunks = [
        json.loads(line.removeprefix("data: "))["choices"][0]
        for line in answer.text.split("\n\n")
        if line.startswith("data: {")
    ]
    for number, choice in enumerate(whole["choices"]):
        mine = [chunk for chunk in chunks if chunk["index"] == number]
        prompt = asked["prompt"][number // 2]
        assert mine[0]["text"] == prompt and choice["text"].startswith(prompt)
        assert mine[0]["logprobs"]["token_logprobs"][0] is None
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        for name, values in choice["logprobs"].items():
            parts = [value for chunk in mine if chunk["logprobs"] for value in chunk["logprobs"][name]]
            if name in ("tokens", "text_offset"):
                assert parts == values
        assert all(len(top or {}) <= max(1, logprobs + 1) for top in choice["logprobs"]["top_logprobs"])
        offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
        assert choice["text"][offsets[-1] :] == tokens[-1] and offsets[0] == 0


async def test_without_echo_or_logprobs_nothing_of_the_prompt_is_scored(http: httpx2.AsyncClient) -> None:
    plain = (await complete(http, prompt="Hello", logprobs=1))["choices"][0]
    assert len(plain["logprobs"]["tokens"]) == 12 and None not in plain["logprobs"]["token_logprobs"]
    assert plain["logprobs"]["text_offset"][0] == 0
    assert (await complete(http, prompt="Hello", echo=True))["choices"][0]["logprobs"] is None
