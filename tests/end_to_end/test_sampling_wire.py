"""Sampling fields from the client's hand to the model and back: an embedded engine behind the SDK."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from holdfast.gateway.embedded import embedded
from holdfast.runtime.model.folder import find_model
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Client, ServerError
from holdfast.sdk.frames.server import TextDelta

pytestmark = pytest.mark.anyio
LINE = "My name is Marisol and I live in Oslo."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(find_model("pocket") / "tokenizer.json"))


async def test_logprobs_come_where_they_are_asked_for(client: Client, tokenizer: Tokenizer) -> None:
    async with client.session(top_logprobs=3) as chat:
        text = await chat.say(LINE).text()
        told = chat.last.logprobs
        assert "".join(one.token for one in told) == text == tokenizer.decode([one.id for one in told])
        for one in told:  # greedy: the token that came is the likeliest
            assert one.id == one.top_logprobs[0].id and one.logprob == one.top_logprobs[0].logprob <= 0
            assert len(one.top_logprobs) == 3
            assert sum(math.exp(other.logprob) for other in one.top_logprobs) <= 1 + 1e-6
        deltas = [event async for event in chat.respond() if isinstance(event, TextDelta)]
        assert [one for delta in deltas for one in delta.logprobs or ()] == list(chat.last.logprobs)
        await chat.update(top_logprobs=None)
        await chat.say("Thanks.").text()
        assert not chat.last.logprobs


async def test_bad_words_stop_ids_and_bias_change_what_is_said(client: Client, tokenizer: Tokenizer) -> None:
    async def said(**fields: object) -> str:
        async with client.session() as chat:
            return await chat.say(LINE, **fields).text()

    plain = await said()
    word = plain.split()[1]
    assert word not in (await said(bad_words=[word])).split()
    ids = tokenizer.encode(plain, add_special_tokens=False).ids
    assert await said(bad_words=[ids[1:3]]) != plain
    assert await said(logit_bias={ids[0]: -100}) != plain
    cut = await said(stop_token_ids=[ids[4]])
    assert plain.startswith(cut) and len(cut) < len(plain)
    assert await said(stop_token_ids=[ids[4]], min_output_tokens=len(ids)) != cut


async def test_a_reply_has_at_least_so_many_tokens(client: Client) -> None:
    async with client.session(min_output_tokens=60, max_output_tokens=60) as chat:
        await chat.say("Hello!").text()
        assert chat.last.usage.output_tokens == 60
        with pytest.raises(ServerError) as refused:
            await chat.say("Hello!", max_output_tokens=59).text()
        assert (refused.value.code, refused.value.param) == ("invalid_value", "response.min_output_tokens")
        with pytest.raises(ServerError) as refused:
            await chat.update(logit_bias={1_000_000: 1})
        assert (refused.value.code, refused.value.param) == ("invalid_value", "session.logit_bias")
        assert chat.session.min_output_tokens == 60


async def test_the_conversation_goes_on_after_a_stop_id(client: Client, tokenizer: Tokenizer) -> None:
    async with client.session() as chat:
        first = await chat.say(LINE).text()
        stop = tokenizer.encode(first, add_special_tokens=False).ids[2]
        await chat.say("Again: " + LINE, stop_token_ids=[stop]).text()
        assert chat.last.status == "completed"
        assert "Marisol" in await chat.say("What is my name?").text()


async def test_the_models_own_defaults_hold_where_nothing_is_said(
    tmp_path: Path, pocket: EngineSettings
) -> None:
    folder = tmp_path / "warm"
    shutil.copytree(find_model("pocket"), folder)
    path = folder / "generation_config.json"
    makers = {"do_sample": True, "temperature": 1.9, "top_k": 30, "repetition_penalty": 1.05}
    path.write_text(json.dumps({**json.loads(path.read_text()), **makers}))
    async with embedded(engine=msgspec.structs.replace(pocket, model=str(folder))) as client:
        async with client.session() as chat:
            shown = chat.session
            assert (shown.temperature, shown.top_k, shown.repetition_penalty) == (1.9, 30, 1.05)
            assert (shown.top_p, shown.min_p) == (1.0, 0.0)
            ours = await chat.say("Why?", seed=3, max_output_tokens=40).text()
            await chat.update(temperature=0, repetition_penalty=1)
            assert (await chat.update(temperature=None)).temperature == 1.9
        async with client.session(temperature=1.9, top_k=30, repetition_penalty=1.05, seed=3) as chat:
            assert await chat.say("Why?", max_output_tokens=40).text() == ours
        async with client.session(temperature=0, repetition_penalty=1.0, seed=3) as chat:
            assert await chat.say("Why?", max_output_tokens=40).text() != ours
