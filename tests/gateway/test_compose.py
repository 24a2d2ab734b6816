"""Faults of the tokenizer are told before the engine loads; without a chat template prompts are completed."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from holdfast import AsyncLLM, SamplingParams
from holdfast.benchmarks.toys import make_toy, teach, text_of
from holdfast.gateway.app import build_app
from holdfast.gateway.embedded import in_memory
from holdfast.gateway.service import Service, opened
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.link.client import EngineLink
from holdfast.runtime.model.folder import find_model
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk.errors import ServerError
from holdfast.sessions.errors import InputInvalid, SessionError, TemplateFailed, TokenizerUnreadable
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.text.language import Language
from holdfast.sessions.text.tokenizer import ChatTokenizer
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import backend

pytestmark = pytest.mark.anyio

SAID = [{"role": "user", "content": "Hi"}]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"model": "scripted", "messages": SAID, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "scripted", "messages": SAID},
    "/tokenize": {"messages": SAID},
}
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/tokenize": {"prompt": "Hi"},
}
FAULTS = [
    ("tokenizer.json", "{"),
    ("tokenizer_config.json", "[]"),
    ("chat_template.jinja", "{% for %}"),
    ("chat_template.jinja", "{{ raise_exception('never') }}"),
]


class NeverLoaded:
    """An engine that must not load."""

    async def __aenter__(self) -> EngineLink:
        raise AssertionError("the engine loads")

    async def __aexit__(self, *error: object) -> None: ...


@pytest.mark.parametrize(("name", "content"), FAULTS)
async def test_a_fault_of_tokenizer_or_template_is_told_before_the_engine_loads(
    name: str, content: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(find_model("pocket"), folder)
    (folder / name).write_text(content)
    service = Service(GatewaySettings(), "model", Scripted(spoken, END))
    with pytest.raises((TokenizerUnreadable, TemplateFailed)) as refused:
        async with opened(service, str(folder), NeverLoaded()):
            pass
    told = refused.value.message
    assert str(folder) in told and "\n" not in told


@asynccontextmanager
async def untemplated() -> AsyncIterator[tuple[Service, httpx2.AsyncClient]]:
    service = Service(GatewaySettings(), "scripted", Scripted(spoken, END))
    language = Language.of(ChatTokenizer(backend("chatml"), None))
    service.open(SessionRegistry(Scripted(spoken, END), language))
    transport = httpx2.ASGITransport(app=build_app(service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        yield service, http
        await service.close()


async def test_without_a_chat_template_prompts_are_served_and_conversations_refused() -> None:
    async with untemplated() as (service, http):
        for path, body in PROMPTS.items():
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
        for path, body in CONVERSATIONS.items():
            answer = await http.post(path, json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400, answer.text
            assert "has no chat template" in error["message"] and "chat_template.jinja" in error["message"]
        async with in_memory(service).session(instructions="Be brief.") as chat:
            with pytest.raises(ServerError, match="has no chat template"):
                await chat.say("Hi")


async def test_a_folder_without_a_chat_template_generates(tmp_path: Path) -> None:
    folder = teach(make_toy("tiny", tmp_path))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<mask>"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    greedy = SamplingParams(temperature=0, max_tokens=4)
    settings = EngineSettings(model="", blocks=16, kernels="reference")
    async with AsyncLLM(str(folder), engine=settings) as llm:
        (output,) = await llm.generate(text_of([5, 6, 7]), greedy)
        assert len(output.outputs[0].token_ids) == 4
        with pytest.raises(SessionError, match="has no chat template"):
            await llm.chat([{"role": "user", "content": "Hi"}], greedy)
        with pytest.raises(InputInvalid, match=r"prompts: 256 is not a token id from 0 to 255"):
            await llm.generate("<mask>", greedy)  # the tokenizer has it, the model has not
