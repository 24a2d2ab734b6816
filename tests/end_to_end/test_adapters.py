"""Adapters on a server, end to end: chosen by model name on every face, by session and fork; loaded, unloaded
and gone while sessions are open, kept in the journal, or interrupted by an engine's death."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import msgspec
import pytest
import torch

from holdfast.benchmarks.toys import make_adapter
from holdfast.gateway import server as processes
from holdfast.gateway.operator.routes import SESSIONS
from holdfast.gateway.server import Serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.errors import AdapterInvalid, SettingsInvalid
from holdfast.runtime.model.adapter import AdapterMaps, fill_slot, read_adapter
from holdfast.runtime.model.folder import POCKET_FOLDER
from holdfast.runtime.model.load import load_model
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Client, ConnectionFailed, ServerError, SessionLost, connect
from holdfast.tests.runtime.model.feeding import Fed
from holdfast.tests.threaded import serving

pytestmark = pytest.mark.anyio

KEY, OPERATOR = "tenants-key", "operators-key"
LINE = "My name is Marisol."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters of the pocket model: two, and two that cannot be served."""
    made = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        make_adapter(made / name, POCKET_FOLDER, rank=8, seed=seed, strength=3.0)
    make_adapter(made / "wide", POCKET_FOLDER, rank=64)
    (make_adapter(made / "cut", POCKET_FOLDER) / "adapter_model.safetensors").write_bytes(b"\0" * 20)
    return made


def engine_of(pocket: EngineSettings, *modules: str, **changes: Any) -> EngineSettings:
    lora = {"enable_lora": True, "lora_modules": modules, "max_loras": 2, "max_cpu_loras": 4}
    return msgspec.structs.replace(pocket, **lora, **changes)


def gateway_of(folder: Path, **changes: Any) -> GatewaySettings:
    settings = GatewaySettings(port=0, api_key=KEY, operator_key=OPERATOR, lora_folder=folder)
    return replace(settings, **changes)


@pytest.fixture(scope="module")
async def server(pocket: EngineSettings, folder: Path) -> AsyncIterator[Serving]:
    async with serving(gateway_of(folder), engine_of(pocket, f"one={folder / 'one'}")) as running:
        yield running


async def ask(server: Serving, method: str, path: str, body: Any = None, key: str = KEY) -> tuple[int, Any]:
    """An HTTP answer: its status, and its JSON or text."""

    def asked() -> tuple[int, Any]:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        kind = answer.getheader("Content-Type", "")
        whole = kind.partition(";")[0] == "application/json"
        return answer.status, json.loads(text) if whole else text

    return await asyncio.to_thread(asked)


async def load(server: Serving, name: str, path: str, key: str = OPERATOR) -> tuple[int, Any]:
    return await ask(server, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, key)


async def unload(server: Serving, name: str, key: str = OPERATOR) -> tuple[int, Any]:
    return await ask(server, "POST", "/v1/unload_lora_adapter", {"lora_name": name}, key)


async def said(server: Serving, adapter: str | None, line: str = LINE) -> str:
    async with (
        connect(server.url, api_key=KEY) as client,
        client.session(adapter=adapter, temperature=0, max_output_tokens=12) as chat,
    ):
        return await chat.say(line).text()


async def completed(server: Serving, model: str, line: str = LINE) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": line}],
        "temperature": 0,
        "max_tokens": 12,
    }
    status, told = await ask(server, "POST", "/v1/chat/completions", body)
    assert status == 200 and told["model"] == model, told
    return told["choices"][0]["message"]["content"]


async def test_tokens_through_the_sdk_are_those_of_torch(server: Serving, folder: Path) -> None:
    """The prompt's ids by the server, greedy tokens by the reference kernels with the adapter in a slot."""
    model = load_model("pocket", "cpu", "float32")
    maps = AdapterMaps(model.config, torch.float32)
    decoder = maps.with_slots(model.decoder, 1, 16)
    fill_slot(decoder.weights, 0, read_adapter(folder / "one", maps))
    texts = {}
    for name, slot in (("one", 0), ("pocket", -1)):
        status, told = await ask(
            server,
            "POST",
            "/tokenize",
            {"model": name, "messages": [{"role": "user", "content": LINE}]},
        )
        assert status == 200
        fed = Fed(replace(model, decoder=decoder), [torch.tensor(told["tokens"])], slots=[slot]).in_chunks(40)
        fed.go_on(12)
        ids = fed.prompts[0][len(told["tokens"]) :].tolist()
        _, text = await ask(server, "POST", "/detokenize", {"model": name, "tokens": ids[:12]})
        texts[name] = text["prompt"]
    one, base = await said(server, "one"), await said(server, None)
    assert one != base
    assert texts["one"].startswith(one) and texts["pocket"].startswith(base)


async def test_every_face_chooses_an_adapter_by_its_name(server: Serving) -> None:
    expected = {name: await said(server, name) for name in ("one", None)}
    for name in ("one", None):
        model = name or "pocket"
        assert await completed(server, model) == expected[name]
        body = {"model": model, "input": LINE, "temperature": 0, "max_output_tokens": 16}
        status, told = await ask(server, "POST", "/v1/responses", body)
        assert status == 200 and told["model"] == model
        assert told["output"][0]["content"][0]["text"].startswith(expected[name][:20])
        message = {"role": "user", "content": LINE}
        body = {"model": model, "messages": [message], "temperature": 0, "max_tokens": 12}
        status, told = await ask(server, "POST", "/v1/messages", body)
        assert status == 200 and told["content"][0]["text"] == expected[name], told


async def test_a_conversation_never_goes_on_in_a_session_of_another_adapter(server: Serving) -> None:
    """The same conversation, first with one model and then with the other: each says what it says when
    fresh."""
    line = "I live in Oslo."
    first = {model: await completed(server, model, line) for model in ("pocket", "one")}

    async def again(model: str) -> str:
        messages = [
            {"role": "user", "content": line},
            {"role": "assistant", "content": first["pocket"]},
            {"role": "user", "content": "Where do I live?"},
        ]
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 12}
        return (await ask(server, "POST", "/v1/chat/completions", body))[1]["choices"][0]["message"][
            "content"
        ]

    assert await again("pocket") != await again("one")


async def test_models_lists_adapters_as_vllm_does(server: Serving, folder: Path) -> None:
    _, told = await ask(server, "GET", "/v1/models")
    listed = {one["id"]: (one["root"], one["parent"]) for one in told["data"]}
    assert listed == {"pocket": ("pocket", None), "one": ("one", "pocket")}
    _, told = await ask(server, "GET", "/v1/models/one")
    assert told["parent"] == "pocket"
    status, told = await ask(server, "GET", "/v1/models/three")
    assert status == 404 and "'pocket', 'one', not 'three'" in told["error"]["message"]


async def test_adapters_are_loaded_and_unloaded_by_operators_alone(server: Serving, folder: Path) -> None:
    for key, status in ((KEY, 403), ("wrong", 401)):
        assert (await load(server, "two", "two", key))[0] == status
        assert (await unload(server, "one", key))[0] == status
    assert (await ask(server, "GET", "/v1/models", key=OPERATOR))[0] == 401
    assert await load(server, "two", "two") == (200, "Success: LoRA adapter 'two' added successfully.")
    two = await said(server, "two")
    assert two == await completed(server, "two") != await said(server, "one")
    status, told = await load(server, "two", str(folder / "two"))
    assert (status, told["error"]["code"]) == (400, "adapter_already_loaded")
    assert await unload(server, "two") == (200, "Success: LoRA adapter 'two' removed successfully.")
    status, told = await unload(server, "two")
    assert (status, told["error"]["code"]) == (404, "adapter_not_found")
    body = {"model": "two", "messages": [{"role": "user", "content": LINE}]}
    status, told = await ask(server, "POST", "/v1/chat/completions", body)
    assert (status, told["error"]["code"]) == (404, "model_not_found")
    with pytest.raises(ConnectionFailed, match="not 'two'"):
        await said(server, "two")


async def test_bad_folders_are_refused_with_file_and_cause(
    server: Serving, folder: Path, tmp_path: Path
) -> None:
    outside = make_adapter(tmp_path / "outside", POCKET_FOLDER, rank=8)
    (folder / "link").symlink_to(outside)
    shutil.copytree(folder / "one", folder / "leak")
    (folder / "leak" / "adapter_model.safetensors").unlink()
    (folder / "leak" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    before = await said(server, "one")
    for path in (
        str(outside),
        "..",
        ".",
        "../outside",
        "link",
        "leak",
        str(folder),
        "a\0b",
        "/",
        "one/../..",
    ):
        status, told = await load(server, "bad", path)
        assert (status, told["error"]["param"]) == (400, "lora_path"), (path, told)
        assert str(outside) not in told["error"]["message"] or path == str(outside)
    for path, words in (
        ("cut", f"{folder / 'cut' / 'adapter_model.safetensors'}: "),
        ("wide", "r: rank 64 is above --max-lora-rank 16"),
        ("none", f"{folder / 'none'}: not a folder"),
    ):
        status, told = await load(server, "bad", path)
        assert (status, told["error"]["code"]) == (400, "adapter_invalid"), told
        assert words in told["error"]["message"] and "\n" not in told["error"]["message"]
    for name in ("pocket", "", " x", "a\nb", "x" * 257):
        status, told = await load(server, name, "two")
        assert (status, told["error"]["param"]) == (400, "lora_name"), told
    for body in ({"lora_name": "x"}, {"lora_name": "x", "lora_path": 5}, {"lora_name": "x", "colour": 1}, []):
        assert (await ask(server, "POST", "/v1/load_lora_adapter", body, OPERATOR))[0] == 400
    assert await said(server, "one") == before


async def test_a_server_without_a_folder_or_without_room_says_so(
    pocket: EngineSettings, folder: Path
) -> None:
    async with serving(gateway_of(folder, lora_folder=None), engine_of(pocket)) as running:
        status, told = await load(running, "two", "two")
        assert (status, told["error"]["code"]) == (409, "adapter_folder_unset")
    async with serving(gateway_of(folder), pocket) as running:
        status, told = await load(running, "two", "two")
        assert (status, told["error"]["code"]) == (409, "adapter_limit_reached")
        assert "--enable-lora" in told["error"]["message"]


async def test_what_cannot_be_served_at_start_ends_the_start(pocket: EngineSettings, folder: Path) -> None:
    with pytest.raises(AdapterInvalid, match="rank 64 is above --max-lora-rank 16"):
        async with serving(gateway_of(folder), engine_of(pocket, f"wide={folder / 'wide'}")):
            pass
    with pytest.raises(SettingsInvalid, match="'pocket' is a name of the model itself"):
        async with serving(gateway_of(folder), engine_of(pocket, f"pocket={folder / 'one'}")):
            pass


async def test_a_fork_has_the_adapter_that_it_asks_for(server: Serving) -> None:
    """It computes the history again only with another one."""
    async with (
        connect(server.url, api_key=KEY) as client,
        client.session(adapter="one", temperature=0, max_output_tokens=12) as chat,
    ):
        assert chat.session.model == "one"
        first = await chat.say(LINE * 8).text()
        (same,), (none,) = await chat.fork(), await chat.fork(adapter=None)
        assert (same.session.model, none.session.model) == ("one", "pocket")
        line = "What is my name?"
        one, base = await same.say(line).text(), await none.say(line).text()
        assert one == await chat.say(line).text()
        assert same.last is not None and none.last is not None
        assert same.last.usage.input_token_details.cached_tokens > 32
        assert none.last.usage.input_token_details.cached_tokens == 0
        (back,) = await none.fork(adapter="one")
        assert back.session.model == "one" and await back.say(line).text()
        with pytest.raises(ServerError, match="No adapter 'three' is loaded"):
            await chat.fork(adapter="three")
        with pytest.raises(ServerError, match="cannot be changed"):
            await chat.update(model="pocket")
    assert first and base


async def test_an_unloaded_adapter_ends_no_turn_and_begins_none(server: Serving) -> None:
    """A running reply goes on; the next turn is refused by a typed error that names the adapter; the session
    goes on once it is loaded again."""
    await load(server, "two", "two")
    async with (
        connect(server.url, api_key=KEY) as client,
        client.session(adapter="two", temperature=0, max_output_tokens=200, min_output_tokens=200) as chat,
    ):
        pieces = []
        turn = chat.say(LINE)
        async for piece in turn:
            pieces.append(piece)
            if len(pieces) == 3:
                assert (await unload(server, "two"))[0] == 200
        assert chat.last is not None and chat.last.usage.output_tokens == 200
        await chat.update(min_output_tokens=1, max_output_tokens=12)
        with pytest.raises(ServerError, match="adapter 'two' is not loaded") as caught:
            await chat.say("And now?").text()
        assert caught.value.code == "adapter_unavailable"
        await load(server, "two", "two")
        assert await chat.say("And now?").text()
        await unload(server, "two")
        await load(server, "two", "one")
        with pytest.raises(ServerError, match="'two' is loaded with other weights"):
            await chat.say("And now?").text()
    await unload(server, "two")


async def test_a_session_in_the_journal_waits_for_its_adapter(
    pocket: EngineSettings, folder: Path, tmp_path: Path
) -> None:
    """The next server has not loaded it: the session is not opened, and stays as it was. An exported one waits
    for it, too."""
    settings, line = gateway_of(folder, store=tmp_path / "store"), "What is my name?"
    path = tmp_path / "session.jsonl"
    async with (
        serving(settings, engine_of(pocket, f"one={folder / 'one'}")) as running,
        connect(running.url, api_key=KEY) as client,
        client.session(adapter="one", temperature=0, max_output_tokens=12) as chat,
    ):
        await chat.say(LINE).text()
        handle = chat.handle
        status, told = await ask(running, "GET", f"{SESSIONS}/{chat.session.id}/export", key=OPERATOR)
        assert status == 200
        await anyio.Path(path).write_text(told)
        expected = await (await chat.fork())[0].say(line).text()
    assert handle is not None

    async def resumed(client: Client) -> str:
        async with client.resume(handle) as chat:
            assert chat.session.model == "one"
            return await chat.say(line).text()

    async with (
        serving(settings, engine_of(pocket, f"one={folder / 'two'}")) as running,
        connect(running.url, api_key=KEY) as client,
    ):
        with pytest.raises(SessionLost, match="'one' is loaded with other weights") as caught:
            await resumed(client)
        assert caught.value.code == "adapter_unavailable"
        with pytest.raises(ServerError, match="'one' is loaded with other weights"):
            async with client.import_session(path):
                pass
        await unload(running, "one")
        with pytest.raises(SessionLost, match="adapter 'one' is not loaded"):
            await resumed(client)
        await load(running, "one", "one")
        assert await resumed(client) == expected
        async with client.import_session(path) as chat:
            assert chat.session.model == "one" and await chat.say(line).text() == expected


async def test_an_engine_that_dies_is_followed_by_one_with_its_adapters(
    pocket: EngineSettings, folder: Path, tmp_path: Path
) -> None:
    """With those that were loaded while it ran, without those that were unloaded: a running reply goes on."""
    copied = tmp_path / "adapters"
    shutil.copytree(folder / "two", copied / "two")
    engine = engine_of(pocket, f"one={folder / 'one'}")
    async with processes.serving(gateway_of(copied), engine) as running:
        await load(running, "two", "two")
        whole = await said(running, "two")
        await unload(running, "one")
        async with (
            connect(running.url, api_key=KEY) as client,
            client.session(adapter="two", temperature=0, max_output_tokens=60) as chat,
        ):
            pieces: list[str] = []
            async for piece in chat.say(LINE):
                pieces.append(piece)
                if len(pieces) == 2:
                    running.engine.kill()
            assert "".join(pieces).startswith(whole[:20])
        _, told = await ask(running, "GET", "/v1/models")
        assert [one["id"] for one in told["data"]] == ["pocket", "two"]
        (copied / "two" / "adapter_model.safetensors").unlink()
        async with (
            connect(running.url, api_key=KEY) as client,
            client.session(adapter="two", temperature=0, max_output_tokens=60) as chat,
        ):
            running.engine.kill()
            with pytest.raises(ServerError, match="adapter 'two' is not loaded"):
                await chat.say(LINE).text()
        assert await said(running, None)


async def test_metrics_tell_of_adapters(server: Serving) -> None:
    await said(server, "one")
    _, text = await ask(server, "GET", "/metrics", key=OPERATOR)
    numbers = dict(
        line.split(" ") for line in text.splitlines() if line.startswith("holdfast_engine_adapter")
    )
    assert float(numbers["holdfast_engine_adapters"]) == 1
    assert float(numbers["holdfast_engine_adapter_slots"]) == 2
    assert float(numbers["holdfast_engine_adapter_slots_held"]) >= 1
    assert float(numbers["holdfast_engine_adapter_swaps_total"]) >= 1
