"""A real model: SmolLM2-135M-Instruct from its GGUF file says what transformers says on the same weights.

What the pocket model cannot show runs here on a real tokenizer, a real template and real text. Skipped where
`make smollm2` was not run.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from itertools import pairwise

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
    model="smollm2", dtype="float32", blocks=384, max_context=2048, host_bytes=0, debug=True
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


async def test_text_streamed_in_pieces_says_what_it_says_at_once(client: Client) -> None:
    """Pieces cut words, digits, spaces and characters of several bytes that tokens share."""
    rng = random.Random(5)
    limits = {"temperature": 0, "max_output_tokens": 12}
    for line in ("Is 2024  a leap year?  Say why.", PROMPTS[7], PROMPTS[9], PROMPTS[13], PROMPTS[16]):
        async with client.session(**limits) as plain, client.session(**limits) as streamed:
            expected = await plain.say(line).text()
            cuts = [0, *sorted(rng.sample(range(1, len(line)), 6)), len(line)]
            async with streamed.input() as typing:
                for begin, end in pairwise(cuts):
                    await typing.append(line[begin:end])
                    await typing.append("🐈 taken back")
                    await typing.replace(end, "")
            assert await streamed.say().text() == expected, line
            assert streamed.last.usage.input_tokens == plain.last.usage.input_tokens


async def test_a_rewound_and_a_forked_session_go_on_as_they_did(client: Client) -> None:
    async with client.session(temperature=0, max_output_tokens=16) as chat:
        await chat.say(TURNS[0]).text()
        here = chat.last.response.output[0].id
        (fork,) = await chat.fork()
        expected = await chat.say(PROMPTS[9]).text()
        went_on = await chat.say(TURNS[4]).text()
        assert await fork.say(PROMPTS[9]).text() == expected
        await chat.rewind(here)
        assert await chat.say(PROMPTS[9]).text() == expected
        assert await chat.say(TURNS[4]).text() == went_on
        assert chat.last.kv.recomputed == 0


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
