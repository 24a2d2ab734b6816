"""Real models with real templates: prompts as transformers writes them, forks, rewinds, streamed text, tools.

Each test runs on each of `real_models`, and is skipped where there is none.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway.batches.sampling_params import SamplingParams
from holdfast.gateway.embedded import embedded
from holdfast.gateway.offline import AsyncLLM
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Client
from holdfast.sdk.frames.items import FunctionCallItem
from holdfast.sessions.text.language import Language

from .real_models import real_models
from .smollm2 import PROMPTS, TURNS

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Add two whole numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
CONVERSATION = [
    {"role": "system", "content": "Answer in one line."},
    {"role": "user", "content": PROMPTS[8]},
    {"role": "assistant", "content": "L'été,  Genève brille 🐈."},
    {"role": "user", "content": PROMPTS[16]},
]


@pytest.fixture(scope="module", params=real_models())
def model(request: pytest.FixtureRequest) -> Path:
    file: Path = request.param
    assert file.is_file(), f"{file}: no such file"
    return file


@pytest.fixture(scope="module")
def shows_tools(model: Path) -> bool:
    return Language.load(model).shows_tools


@pytest.fixture(scope="module")
async def client(model: Path) -> AsyncIterator[Client]:
    engine = EngineSettings(model=str(model), blocks=256, max_context=2048, host_bytes=0, debug=True)
    async with embedded(engine=engine) as client:
        yield client


@lru_cache(maxsize=1)
def transformers_tokenizer(file: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


async def test_a_prompt_has_the_ids_that_transformers_gives_it(model: Path, shows_tools: bool) -> None:
    oracle = transformers_tokenizer(model)
    async with AsyncLLM(str(model), max_model_len=1024) as llm:
        for tools in (None, [ADD])[: 1 + shows_tools]:
            (done,) = await llm.chat(CONVERSATION, SamplingParams(max_tokens=1), tools=tools, use_tqdm=False)
            function = {name: value for name, value in ADD.items() if name != "type"}
            expected = oracle.apply_chat_template(
                CONVERSATION,
                tools=tools and [{"type": "function", "function": function}],
                add_generation_prompt=True,
                return_dict=False,
            )
            assert done.prompt_token_ids == expected


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


async def test_a_tool_is_called_and_its_output_is_read(client: Client, shows_tools: bool) -> None:
    if not shows_tools:
        pytest.skip("its template shows no tools")
    asked = "What is 1234 plus 4321? Use the tool."
    async with client.session(tools=[ADD], temperature=0, parallel_tool_calls=False) as chat:
        await chat.say(asked, tool_choice="required", max_output_tokens=200).text()
        (call,) = (item for item in chat.last.response.output if isinstance(item, FunctionCallItem))
        assert call.name == "add" and json.loads(call.arguments) == {"a": 1234, "b": 4321}
        await chat.answer(call, "The sum is five thousand and 5555.")
        text = await chat.say(tool_choice="none", max_output_tokens=60).text()
        assert "5555" in text, "what only the tool said"
        assert chat.last.kv.recomputed == 0
