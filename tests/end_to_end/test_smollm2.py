"""A real model: SmolLM2-135M-Instruct from its GGUF file says what transformers says on the same weights.

What the pocket model cannot show runs here on a real tokenizer, a real template and real text. Skipped where
`make smollm2` was not run. What any real model shows is in `test_real_models`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import jsonschema
import pytest

from holdfast.gateway.embedded import embedded
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.grammar import queue
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Client, ServerError

from . import smollm2
from .smollm2 import FILE, PROMPTS, TURNS, Transformers, transformers_on

pytestmark = [pytest.mark.anyio, smollm2.needed, pytest.mark.timeout(900)]

ENGINE = EngineSettings(
    model="smollm2",
    dtype="float32",
    kernels="reference",  # it computes with the dequantised weights, as transformers does
    blocks=384,
    max_context=2048,
    host_bytes=0,
    debug=True,
)
SAID, TOLD, END = 20, 40, 2
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[Client]:
    async with embedded(engine=ENGINE) as client:
        yield client


@pytest.fixture(scope="module")
def oracle() -> Transformers:
    return transformers_on(FILE)


async def test_20_prompts_say_what_transformers_says(client: Client, oracle: Transformers) -> None:
    for prompt in PROMPTS:
        ids = oracle.render([{"role": "user", "content": prompt}])
        expected = oracle.reply(ids, SAID)
        async with client.session(temperature=0, max_output_tokens=SAID) as chat:
            pieces = [piece async for piece in chat.say(prompt)]
            assert "".join(pieces) == oracle.tokenizer.decode(expected, skip_special_tokens=True), prompt
            assert chat.last.usage.input_tokens == len(ids)
            assert chat.last.usage.output_tokens == len(expected)


async def test_a_conversation_of_five_turns_says_what_transformers_says(
    client: Client, oracle: Transformers
) -> None:
    """Its prompts hold the ids that the model said, which need not be those of their text."""
    ids: list[int] = []
    messages: list[dict[str, str]] = []
    async with client.session(temperature=0, max_output_tokens=TOLD) as chat:
        for line in TURNS:
            messages.append({"role": "user", "content": line})
            asked = f"<|im_start|>user\n{line}<|im_end|>\n<|im_start|>assistant\n"
            ids += oracle.tokenizer.encode(f"<|im_end|>\n{asked}") if ids else oracle.render(messages)
            assert oracle.tokenizer.decode(ids) == oracle.tokenizer.decode(oracle.render(messages))
            expected = oracle.reply(ids, TOLD)
            text = await chat.say(line).text()
            assert text == oracle.tokenizer.decode(expected, skip_special_tokens=True), line
            assert chat.last.usage.input_tokens == len(ids)
            if len(messages) > 1:  # the first one's beginning may be another session's
                assert chat.last.kv.prefilled == chat.last.kv.new
            messages.append({"role": "assistant", "content": text})
            ids += expected[:-1] if expected[-1] == END else expected


async def test_json_follows_its_schema(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar works on the real vocabulary, with text of several bytes in it."""
    monkeypatch.setattr(queue, "COMPILE_SECONDS", 60.0)
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Zürich", "東京"]}, "year": {"type": "integer", "maximum": 2024}},
        "required": ["city", "year"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "trip", "schema": schema, "strict": True}
    for seed in range(3):
        async with client.session(temperature=1.2, seed=seed) as chat:
            text = await chat.say("Where do you go, and when?", text={"format": form}).text()
            assert chat.last.status == "completed"
            jsonschema.validate(json.loads(text), schema)


async def test_a_stop_string_of_several_bytes_ends_a_reply(client: Client) -> None:
    """Its characters are cut by tokens; no half of one is sent."""
    choice = {"type": "choice", "choices": ["Käse und 寿司 🐈 zum Abend"]}
    for stop, kept in (("寿司", "Käse und "), ("🐈", "Käse und 寿司 "), ("司 🐈", "Käse und 寿"), ("ä", "K")):
        async with client.session(temperature=0) as chat:
            pieces = [piece async for piece in chat.say("Essen?", grammar=choice, stop=[stop])]
            assert "".join(pieces) == kept
            assert not any("\ufffd" in piece for piece in pieces)


async def test_tools_are_refused_unless_the_fallback_is_asked_for(client: Client) -> None:
    with pytest.raises(ServerError, match="--tool-fallback"):
        async with client.session(tools=[TOOL]) as chat:
            await chat.say("What is 1 + 1?").text()
    async with (
        embedded(engine=ENGINE, settings=GatewaySettings(tool_fallback=True)) as told,
        told.session(tools=[TOOL], max_output_tokens=8) as chat,
    ):
        await chat.say("What is 1 + 1?").text()
        assert chat.last.usage.input_tokens > 60, "the tool is in the instructions"
