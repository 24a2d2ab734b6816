"""Stored responses and conversations: found again, also by the next server, and by their tenant alone."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway.settings import GatewaySettings
from holdfast.kvstore.log_lines import LogSettings, logging_lines
from holdfast.sessions.journal.store import JournalStore
from holdfast.tests.sessions.conversation.test_continuation import hashed
from holdfast.tests.stored_files import bytes_below

from .stage import Answer, Json, Stage, staged, text_of, told
from .test_create import CALL, TOOL, user

pytestmark = pytest.mark.anyio

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
LONG = " ".join(f"word {number}" for number in range(300))


async def get(stage: Stage, path: str) -> Any:
    answer = await stage.ask("GET", path)
    assert answer.status == 200, answer.body
    return answer.json


async def streamed(stage: Stage, name: str, after: int | None = None) -> list[Json]:
    more = "" if after is None else f"&starting_after={after}"
    answer = await stage.ask("GET", f"{RESPONSES}/{name}?stream=true{more}")
    assert answer.status == 200, answer.body
    return answer.events


async def test_a_stored_response_is_told_again_with_the_same_events_by_the_next_server(
    tmp_path: Path,
) -> None:
    link = told("Hmm." + CALL, "Sunny.")
    link.logprobs = True
    async with staged(tmp_path, link=link) as stage:
        events = await stage.stream(
            [user("Weather?")], tools=[TOOL], include=["message.output_text.logprobs"], top_logprobs=0
        )
        first = events[-1]["response"]
        assert await get(stage, f"{RESPONSES}/{first['id']}") == first
        assert await streamed(stage, first["id"]) == events
    async with staged(tmp_path, link=told("Sunny.")) as stage:
        assert await get(stage, f"{RESPONSES}/{first['id']}") == first
        assert await streamed(stage, first["id"]) == events
        for after in (0, 4, len(events) - 2):
            assert await streamed(stage, first["id"], after) == events[after + 1 :]
        assert await streamed(stage, first["id"], 10_000) == []
        call = first["output"][1]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        second = await stage.create([output], previous_response_id=first["id"], tools=[TOOL])
        assert text_of(second) == "Sunny.", "the call is still known"
        assert second["kv"]["new"] < second["usage"]["input_tokens"], "the session goes on"
    async with staged(tmp_path) as stage:
        listed = await get(stage, f"{RESPONSES}/{second['id']}/input_items?order=asc")
        kinds = [item["type"] for item in listed["data"]]
        assert kinds == ["message", "message", "function_call", "function_call_output"]
        assert listed["data"][1:3] == first["output"]


async def test_each_stored_response_is_a_point_to_continue_from() -> None:
    async with staged(link=told("One.", "Two.", "Three.", "Other.")) as stage:
        first = await stage.create("a")
        second = await stage.create("b", previous_response_id=first["id"])
        third = await stage.create("c", previous_response_id=second["id"])
        other = await stage.create("d", previous_response_id=first["id"])
        for response in (second, third, other):
            assert response["kv"]["prefilled"] == response["kv"]["new"]
        texts = [item["content"][0]["text"] for item in await items_before(stage, other)]
        assert texts == ["a", "One.", "d"]
        plain = await stage.create("e", previous_response_id=first["id"], instructions="Be brief.")
        assert plain["instructions"] == "Be brief." and other["instructions"] is None


@pytest.mark.parametrize("by", ["previous_response_id", "conversation", "prompt_cache_key"])
async def test_of_two_conversations_with_the_same_words_each_goes_on_in_its_own_session(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = hashed(monkeypatch)

    async def named(response: Json | None, key: str = "") -> Json:
        if by == "conversation":
            made = await stage.ask("POST", CONVERSATIONS, {}) if response is None else None
            return {by: made.json["id"] if made else response["conversation"]["id"]}
        if by == "prompt_cache_key":
            return {by: key if response is None else response[by]}
        return {} if response is None else {by: response["id"]}

    async with staged(link=told(*["One."] * 6)) as stage:
        firsts = [await stage.create(LONG, **await named(None, key)) for key in "ab"]
        assert len(stage.service.sessions()) == 2
        for first in firsts:
            sizes.clear()
            before = [user(LONG), *first["output"]] if by == "prompt_cache_key" else []
            second = await stage.create([*before, user("More")], **await named(first))
            assert second["kv"]["new"] < 50 < second["usage"]["input_tokens"]
            assert max(sizes) < 2000 < len(LONG), "its first message is not hashed whole"
        assert len(stage.service.sessions()) == 2


async def items_before(stage: Stage, response: Json) -> list[Json]:
    return (await get(stage, f"{RESPONSES}/{response['id']}/input_items?order=asc"))["data"]


async def test_input_items_come_in_pages() -> None:
    async with staged() as stage:
        response = await stage.create([user(f"line {number}") for number in range(7)])
        path = f"{RESPONSES}/{response['id']}/input_items"
        seen, after = [], ""
        while True:
            page = await get(stage, f"{path}?limit=3{after}")
            seen += [item["content"][0]["text"] for item in page["data"]]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        assert seen == [f"line {number}" for number in reversed(range(7))]
        for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nothing"):
            status, code, param = await stage.refused("GET", f"{path}?{query}")
            assert (status, code, param) == (400, "invalid_value", query.split("=")[0])


async def test_a_deleted_response_is_unknown_and_its_continuations_stay(tmp_path: Path) -> None:
    async with staged(tmp_path, link=told("One.", "Two.", "Three.")) as stage:
        first = await stage.create("a")
        second = await stage.create("b", previous_response_id=first["id"])
        answer = await stage.ask("DELETE", f"{RESPONSES}/{first['id']}")
        assert answer.json == {"id": first["id"], "object": "response", "deleted": True}
        unknown = (404, "response_not_found", None)
        assert await stage.refused("GET", f"{RESPONSES}/{first['id']}") == unknown
        assert await stage.refused("DELETE", f"{RESPONSES}/{first['id']}") == unknown
    async with staged(tmp_path, link=told("Three.")) as stage:
        assert await stage.refused("GET", f"{RESPONSES}/{first['id']}") == unknown
        third = await stage.create("c", previous_response_id=second["id"])
        texts = [item["content"][0]["text"] for item in await items_before(stage, third)]
        assert texts == ["a", "One.", "b", "Two.", "c"]


async def test_what_is_not_stored_is_unknown() -> None:
    async with staged() as stage:
        response = await stage.create("a", store=False)
        assert response["store"] is False
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/input_items"),
            ("GET", "?stream=true"),
        ):
            status, code, _ = await stage.refused(method, f"{RESPONSES}/{response['id']}{path}")
            assert (status, code) == (404, "response_not_found"), path
        body = {"input": "b", "previous_response_id": response["id"]}
        refusal = await stage.refused("POST", RESPONSES, body)
        assert refusal == (400, "previous_response_not_found", "previous_response_id")


async def test_another_tenants_ids_are_unknown_ones(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a anna\nkey-b bert\n")
    async with staged(tmp_path / "store", settings=GatewaySettings(keys=keys)) as stage:
        made = await stage.ask("POST", RESPONSES, {"input": "a"}, key="key-a")
        conversation = await stage.ask("POST", CONVERSATIONS, {"items": [user("x")]}, key="key-a")
        name, kept = made.json["id"], conversation.json["id"]
        assert (await stage.ask("GET", f"{RESPONSES}/{name}", key="key-a")).json == made.json
        for own, other in ((name, "resp_0"), (kept, "conv_0")):
            root = RESPONSES if own == name else CONVERSATIONS
            theirs = await stage.refused("GET", f"{root}/{own}", key="key-b")
            assert theirs == await stage.refused("GET", f"{root}/{other}", key="key-b")
        for field, value in (("previous_response_id", name), ("conversation", kept)):
            status, code, _ = await stage.refused(
                "POST", RESPONSES, {"input": "b", field: value}, key="key-b"
            )
            assert code in ("previous_response_not_found", "conversation_not_found") and status in (400, 404)


# --- in the background --------------------------------------------------------------------------------------


async def test_a_response_in_the_background_runs_without_its_client() -> None:
    async with staged(link=told("Slow but sure.")) as stage:
        begun = await stage.create("go", background=True)
        assert begun["status"] == "in_progress" and begun["background"] is True
        ended = await stage.ended(begun["id"])
        assert ended["status"] == "completed" and text_of(ended) == "Slow but sure."


async def test_a_stream_in_the_background_goes_on_when_its_client_leaves_and_can_be_read_on() -> None:
    async with staged(link=told(LONG)) as stage:
        body = {"input": "go", "background": True, "stream": True, "max_output_tokens": 4000}
        answer = await stage.ask("POST", RESPONSES, body, leave=lambda sent: sent.count(b".delta") > 3)
        whole = [event.split("\ndata: ")[1] for event in answer.body.decode().split("\n\n")[:-1]]
        name = json.loads(whole[0])["response"]["id"]
        seen = len(whole)
        rest = await streamed(stage, name, seen - 1)
        assert [event["sequence_number"] for event in rest] == list(range(seen, seen + len(rest)))
        assert rest[-1]["type"] == "response.completed"
        assert text_of(rest[-1]["response"]) == LONG
        assert await streamed(stage, name, seen - 1) == rest, "also when it has ended"


async def test_nothing_is_written_after_a_cancel() -> None:
    link = told(LONG)
    async with staged(link=link) as stage:
        begun = await stage.create("go", background=True, max_output_tokens=4000)
        reading = asyncio.create_task(streamed(stage, begun["id"]))
        for _ in range(200):
            await asyncio.sleep(0)
        cancelled = (await stage.ask("POST", f"{RESPONSES}/{begun['id']}/cancel")).json
        assert cancelled["status"] == "cancelled" and 0 < len(text_of(cancelled)) < len(LONG)
        events = await reading
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"] == cancelled == await get(stage, f"{RESPONSES}/{begun['id']}")
        assert (await stage.ask("POST", f"{RESPONSES}/{begun['id']}/cancel")).json == cancelled
        more = await stage.create("and?", previous_response_id=begun["id"], max_output_tokens=5)
        assert more["kv"]["prefilled"] == more["kv"]["new"], "what it said stays in the session"


async def test_a_response_that_ran_when_its_server_ended_is_failed(tmp_path: Path) -> None:
    async with staged(tmp_path, link=told(LONG)) as stage:
        begun = await stage.create("go", background=True, max_output_tokens=4000)
        told_now = await stage.refused("POST", RESPONSES, {"input": "x", "previous_response_id": begun["id"]})
        assert told_now == (400, "invalid_value", "previous_response_id"), "it has no end yet"
    async with staged(tmp_path, link=told("Go on.")) as stage:
        lost = await get(stage, f"{RESPONSES}/{begun['id']}")
        assert lost["status"] == "failed" and lost["error"]["code"] == "server_error"
        assert (await stage.create("x", previous_response_id=begun["id"]))["status"] == "completed"


# --- references and compaction ------------------------------------------------------------------------------


async def test_a_conversation_that_is_not_stored_is_used_again_in_memory_and_never_on_disk(
    tmp_path: Path,
) -> None:
    async with staged(tmp_path, link=told("One.", "Two.", "Three.", "Four.", "Five.")) as stage:
        given = [user("Zanzibar")]
        first = await stage.create(given, store=False)
        given += [*first["output"], user("Samarkand")]
        second = await stage.create(given, store=False)
        assert second["kv"]["prefilled"] == second["kv"]["new"] < second["usage"]["input_tokens"]
        (live,) = stage.service.sessions()
        assert not live.session.log.durable
        given += [*second["output"], user("Timbuktu")]
        third = await stage.create(given)
        assert text_of(third) == "Three." and len(stage.service.sessions()) == 2, (
            "what is stored is whole there"
        )
        given += [*third["output"], user("Valparaiso")]
        fourth = await stage.create(given, store=False)
        assert fourth["kv"]["prefilled"] == fourth["kv"]["new"] < fourth["usage"]["input_tokens"]
        assert [live.session.log.durable for live in stage.service.sessions()] == [False, True, False]
        given += [*fourth["output"], user("Wagadugu")]
        fifth = await stage.create(given, store=False)
        assert fifth["kv"]["prefilled"] == fifth["kv"]["new"] and len(stage.service.sessions()) == 3
    disk = bytes_below(tmp_path)
    assert b"Timbuktu" in disk and b"Zanzibar" in disk, "the past of what is stored is stored"
    assert b"Valparaiso" not in disk and b"Wagadugu" not in disk
    async with staged(tmp_path, link=told("Five.")) as stage:
        again = await stage.create(given, store=False)
        assert again["kv"]["new"] < again["usage"]["input_tokens"], "the stored beginning goes on, as a copy"
        (live,) = stage.service.sessions()
        assert text_of(again) == "Five." and not live.session.log.durable


async def test_references_name_stored_items() -> None:
    async with staged(link=told("One.", "Two.", "Three.")) as stage:
        first = await stage.create([user("a")])
        asked = (await items_before(stage, first))[0]
        refs = [{"type": "item_reference", "id": one} for one in (asked["id"], first["output"][0]["id"])]
        second = await stage.create([*refs, user("b")])
        assert second["kv"]["prefilled"] == second["kv"]["new"], "they are the same conversation"
        bare = await stage.create([{"id": first["output"][0]["id"]}, user("b")])
        assert [item["type"] for item in await items_before(stage, bare)] == ["message"] * 2


async def test_a_compacted_conversation_begins_a_new_chain() -> None:
    async with staged(link=told("One.", "A summary.", "Two.")) as stage:
        first = await stage.create("My name is Marisol.")
        body = {"model": "fake", "previous_response_id": first["id"]}
        compacted = (await stage.ask("POST", f"{RESPONSES}/compact", body)).json
        assert compacted["object"] == "response.compaction" and compacted["usage"]["output_tokens"] > 0
        (item,) = compacted["output"]
        assert item["type"] == "compaction"
        second = await stage.create([item, user("Who am I?")])
        counted = await stage.ask("POST", f"{RESPONSES}/input_tokens", {"input": [item]})
        assert text_of(second) == "Two." and counted.json["input_tokens"] > 10
        status, code, param = await stage.refused("POST", f"{RESPONSES}/compact", {"input": "x"})
        assert (status, code, param) == (400, "missing_required_parameter", "model")


# --- conversations ------------------------------------------------------------------------------------------


async def test_a_conversation_is_made_changed_and_deleted(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        made = (await stage.ask("POST", CONVERSATIONS, {"metadata": {"a": "1"}, "items": [user("x")]})).json
        path = f"{CONVERSATIONS}/{made['id']}"
        assert made["object"] == "conversation" and made["metadata"] == {"a": "1"}
        changed = (await stage.ask("POST", path, {"metadata": {"b": "2"}})).json
        assert changed == {**made, "metadata": {"b": "2"}}
    async with staged(tmp_path) as stage:
        assert await get(stage, path) == changed
        added = (await stage.ask("POST", f"{path}/items", {"items": [user("y"), user("z")]})).json
        assert [item["content"][0]["text"] for item in added["data"]] == ["y", "z"]
        listed = await get(stage, f"{path}/items?order=asc")
        assert [item["content"][0]["text"] for item in listed["data"]] == ["x", "y", "z"]
        assert len({item["id"] for item in listed["data"]}) == 3
        item = listed["data"][1]
        assert await get(stage, f"{path}/items/{item['id']}") == item
        assert (await stage.ask("DELETE", f"{path}/items/{item['id']}")).json == changed
        assert (await stage.refused("GET", f"{path}/items/{item['id']}"))[:2] == (404, "item_not_found")
        listed = await get(stage, f"{path}/items")
        assert [item["content"][0]["text"] for item in listed["data"]] == ["z", "x"]
        gone = (await stage.ask("DELETE", path)).json
        assert gone == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
        for method, more in (("GET", ""), ("DELETE", ""), ("GET", "/items"), ("GET", "/items/msg_1")):
            refusal = await stage.refused(method, f"{path}{more}")
            assert refusal[:2] == (404, "conversation_not_found")


async def test_the_line_of_a_turn_names_its_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_lines("holdfast", LogSettings(form="json")):
        async with staged(link=told("One.")) as stage:
            kept = (await stage.ask("POST", CONVERSATIONS, {})).json["id"]
            response = await stage.create("a", conversation=kept)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (ended,) = [line for line in lines if line["message"] == "response completed"]
    assert (ended["reply"], ended["conversation"]) == (response["id"], kept)


async def test_responses_join_their_conversation(tmp_path: Path) -> None:
    async with staged(tmp_path, link=told("One." + CALL, "Two.", "Three.")) as stage:
        kept = (await stage.ask("POST", CONVERSATIONS, {})).json["id"]
        first = await stage.create("a", conversation=kept, tools=[TOOL])
        assert first["conversation"] == {"id": kept}
        call = first["output"][1]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        second = await stage.create([output], conversation={"id": kept}, tools=[TOOL])
        assert second["kv"]["prefilled"] == second["kv"]["new"]
    async with staged(tmp_path, link=told("Three.")) as stage:
        third = await stage.create("b", conversation=kept, tools=[TOOL])
        listed = await get(stage, f"{CONVERSATIONS}/{kept}/items?order=asc")
        kinds = [item["type"] for item in listed["data"]]
        assert kinds == ["message", "message", "function_call", "function_call_output", *["message"] * 3]
        assert listed["data"][-1] == third["output"][0]
        before = await items_before(stage, third)
        assert before == listed["data"][:-1]
        follow = await stage.create("c", previous_response_id=second["id"], tools=[TOOL])
        assert follow["conversation"] is None
        assert len((await get(stage, f"{CONVERSATIONS}/{kept}/items"))["data"]) == 7


async def test_one_response_at_a_time_writes_a_conversation() -> None:
    async with staged(link=told(LONG, "Two.")) as stage:
        kept = (await stage.ask("POST", CONVERSATIONS, {})).json["id"]
        begun = await stage.create("a", conversation=kept, background=True, max_output_tokens=4000)
        body = {"input": "b", "conversation": kept}
        status, code, _ = await stage.refused("POST", RESPONSES, body)
        assert (status, code) == (409, "conversation_already_has_active_response")
        await stage.ask("POST", f"{RESPONSES}/{begun['id']}/cancel")
        answer: Answer = await stage.ask("POST", RESPONSES, body)
        assert answer.status == 200


async def test_an_echo_of_an_item_is_that_item_and_another_one_with_its_id_is_refused() -> None:
    async with staged(link=told("One.", "Two.", "Three.", "Four.")) as stage:
        first = await stage.create("a")
        said = first["output"][0]
        nexts: dict[str, Any] = {"previous_response_id": first["id"]}
        plain = await stage.create("b", **nexts)
        echoed = await stage.create([said, {"role": "user", "content": "b"}], **nexts)
        assert echoed["usage"]["input_tokens"] == plain["usage"]["input_tokens"], "the context is not doubled"
        named = [{"type": "item_reference", "id": said["id"]}, {"role": "user", "content": "b"}]
        assert (await stage.create(named, **nexts))["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
        other = {**said, "content": [{**said["content"][0], "text": "Another."}]}
        twice = {"type": "message", "role": "user", "content": "c", "id": "msg_mine"}
        for given, at in (([other], 0), ([twice, twice], 1)):
            refused = await stage.refused("POST", RESPONSES, {"input": given, **nexts})
            assert refused == (400, "invalid_value", f"input[{at}].id")


async def test_ids_in_a_conversation_are_distinct() -> None:
    async with staged(link=told("One.")) as stage:
        path = f"/v1/conversations/{(await stage.ask('POST', '/v1/conversations', {})).json['id']}/items"
        mine = {"type": "message", "role": "user", "content": "a", "id": "msg_mine"}
        assert await stage.refused("POST", path, {"items": [mine, mine]}) == (
            400,
            "invalid_value",
            "items[1].id",
        )
        for _ in range(2):
            added = await stage.ask("POST", path, {"items": [mine]})
            assert [item["id"] for item in added.json["data"]] == ["msg_mine"]
        assert (await stage.refused("POST", path, {"items": [{**mine, "content": "b"}]}))[0] == 400
        page = (await stage.ask("GET", path)).json
        assert len(page["data"]) == 1 and not page["has_more"]
        assert (await stage.ask("DELETE", f"{path}/msg_mine")).status == 200
        assert (await stage.ask("GET", path)).json["data"] == []


async def test_no_item_comes_between_a_response_and_its_input() -> None:
    """As its items are stored at its end, others wait for that."""
    async with staged(link=told("One.")) as stage:
        made = (await stage.ask("POST", "/v1/conversations", {})).json["id"]
        stage.link.flowing = False
        body = {"input": "a", "conversation": made, "background": True}
        running = (await stage.ask("POST", RESPONSES, body)).json["id"]
        path = f"/v1/conversations/{made}/items"
        item = {"role": "user", "content": "b"}
        busy = await stage.refused("POST", path, {"items": [item]})
        assert busy == (409, "conversation_already_has_active_response", "conversation")
        stage.link.flow()
        await stage.ended(running)
        assert (await stage.ask("POST", path, {"items": [item]})).status == 200
        texts = [
            one["content"][0]["text"] for one in (await stage.ask("GET", f"{path}?order=asc")).json["data"]
        ]
        assert texts == ["a", "One.", "b"]


async def test_a_response_ends_only_when_the_journal_has_it(tmp_path: Path) -> None:
    async with staged(tmp_path, link=told("One.", "Two.")) as stage:
        await stage.create("a")
        writing, gate = JournalStore.write, threading.Event()
        monkey = pytest.MonkeyPatch()
        monkey.setattr(JournalStore, "write", lambda store, group: (gate.wait(20), writing(store, group))[1])
        sent, written = [b""], asyncio.Event()

        def stay(body: bytes) -> bool:
            sent[0] = body
            if b"response.output_item.done" in body:
                written.set()
            return False

        body = {"input": "b", "stream": True}
        task = asyncio.create_task(stage.ask("POST", RESPONSES, body, leave=stay))
        try:
            await written.wait()
            for _ in range(500):
                await asyncio.sleep(0)
            assert b"response.completed" not in sent[0] and not task.done()
        finally:
            gate.set()
        assert (await task).events[-1]["type"] == "response.completed"
        monkey.undo()


async def test_a_conversation_goes_on_from_one_face_to_another() -> None:
    async with staged(link=told("One.", "Two.", "Three.")) as stage:
        first = await stage.create("a", instructions="Be brief.")
        messages = [
            {"role": "system", "content": "Be brief."},
            user("a"),
            {"role": "assistant", "content": text_of(first)},
            user("b"),
        ]
        chat = (await stage.ask("POST", "/v1/chat/completions", {"messages": messages})).json
        assert chat["kv"]["prefilled"] == chat["kv"]["new"] < chat["usage"]["prompt_tokens"]
        items = [
            *messages,
            {"role": "assistant", "content": chat["choices"][0]["message"]["content"]},
            user("c"),
        ]
        third = await stage.create(items)
        assert third["kv"]["prefilled"] == third["kv"]["new"] < third["usage"]["input_tokens"]
