"""What a client deletes is gone: from every file of the store within the promised time, and on a full disk it
makes room."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.sessions.settings import JournalSettings
from holdfast.tests.stored_files import contents

from .stage import Json, Stage, staged, told

pytestmark = pytest.mark.anyio
MIB = 1 << 20
AT_ONCE = JournalSettings(reserve_bytes=0, erase_seconds=0.0)
SECRET = "The password is swordfish. "


@pytest.fixture
def small_disk(tmpfs: Callable[[str], Path]) -> Path:
    return tmpfs("12m")


def holds(store: Path, text: str) -> list[str]:
    """The names of the files in which the text stands."""
    wanted = text.encode()
    return [path.name for path, data in contents(store) if wanted in data]


async def gone_from(store: Path, text: str) -> None:
    async with asyncio.timeout(30):  # a service that is never left would hide why
        while holds(store, text):
            await asyncio.to_thread(bool)


async def conversation(stage: Stage, text: str, items: int = 1) -> str:
    item = {"type": "message", "role": "user", "content": text}
    answer = await stage.ask("POST", "/v1/conversations", {"items": [item] * items})
    return answer.json["id"] if answer.status == 200 else ""


async def deleted(stage: Stage, path: str) -> None:
    answer = await stage.ask("DELETE", path)
    assert answer.status == 200, answer.body


async def test_a_deleted_response_is_gone_from_all_files_with_the_session_that_wrote_it(
    tmp_path: Path,
) -> None:
    async with staged(tmp_path, link=told("Thanks.", "Fine."), journal=AT_ONCE) as stage:
        first = await stage.create(SECRET)
        other = await stage.create("How are you?")
        assert holds(tmp_path, SECRET)
        await deleted(stage, f"/v1/responses/{first['id']}")
        await gone_from(tmp_path, SECRET)
        again = await stage.ask("GET", f"/v1/responses/{other['id']}")
        assert again.status == 200 and "Fine." in again.body.decode()
        closed = [verb for verb in stage.link.log if verb[0] == "close" and verb[-1] is False]
        assert closed, "and its KV"


async def test_what_later_responses_go_on_from_stays_until_they_are_deleted(tmp_path: Path) -> None:
    async with staged(tmp_path, link=told("Thanks.", "Yes.", "Yes again."), journal=AT_ONCE) as stage:
        first = await stage.create(SECRET)
        second = await stage.create("Do you know it?", previous_response_id=first["id"])
        await deleted(stage, f"/v1/responses/{first['id']}")
        third = await stage.create("And now?", previous_response_id=second["id"])
        listed = await stage.ask("GET", f"/v1/responses/{third['id']}/input_items")
        assert SECRET in listed.body.decode()
        for one in (second, third):
            await deleted(stage, f"/v1/responses/{one['id']}")
        await gone_from(tmp_path, SECRET)


@pytest.mark.parametrize("dies", [False, True], ids=["in the same server", "in the next one"])
async def test_a_response_that_goes_on_from_an_earlier_one_does_not_keep_what_it_never_had(
    tmp_path: Path, dies: bool
) -> None:
    late = JournalSettings(reserve_bytes=0)
    link = told("Hello.", "Thanks.", "Fine.")
    async with staged(tmp_path, link=link, journal=late if dies else AT_ONCE) as stage:
        first = await stage.create("Hi.")
        second = await stage.create(SECRET, previous_response_id=first["id"])
        third = await stage.create("How are you?", previous_response_id=first["id"])
        await deleted(stage, f"/v1/responses/{second['id']}")
        if not dies:
            await gone_from(tmp_path, SECRET)
    async with staged(tmp_path, link=told("Good."), journal=AT_ONCE) as stage:
        await gone_from(tmp_path, SECRET)
        fourth = await stage.create("And now?", previous_response_id=third["id"])
        listed = await stage.ask("GET", f"/v1/responses/{fourth['id']}/input_items")
        assert all(text in listed.body.decode() for text in ("Hi.", "Hello.", "How are you?", "Fine."))


async def test_no_summary_of_a_conversation_keeps_its_text(tmp_path: Path) -> None:
    """A summary is no stored object, so no client could delete what it keeps, nor what a server that dies
    meanwhile has left of it."""
    long = "Hm. " * 300
    async with staged(tmp_path, link=told("Thanks.", "Yes.", long, long), journal=AT_ONCE) as stage:
        first = await stage.create(SECRET)
        second = await stage.create("Do you know it?", previous_response_id=first["id"])
        for body in ({"previous_response_id": first["id"]}, {"input": f"Then: {SECRET}"}):
            asked = stage.ask("POST", "/v1/responses/compact", {"model": "fake", **body})
            summary = asyncio.ensure_future(asked)
            while not summary.done():
                assert not await asyncio.to_thread(holds, tmp_path, f"Then: {SECRET}")
            assert summary.result().status == 200, summary.result().body
        assert not holds(tmp_path, f"Then: {SECRET}")
        for one in (first, second):
            await deleted(stage, f"/v1/responses/{one['id']}")
        await gone_from(tmp_path, SECRET)


@pytest.mark.parametrize("dies", [False, True], ids=["in the same server", "in the next one"])
async def test_a_deleted_conversation_leaves_logs_in_which_little_is_dead(tmp_path: Path, dies: bool) -> None:
    late = JournalSettings(reserve_bytes=0)
    async with staged(tmp_path, link=told("Thanks."), journal=late if dies else AT_ONCE) as stage:
        kept = [await conversation(stage, f"Fact {number}. " * 400) for number in range(20)]
        secret = await conversation(stage, SECRET)
        answer = await stage.create("Do you know it?", conversation=secret)
        await deleted(stage, f"/v1/conversations/{secret}")
        await deleted(stage, f"/v1/responses/{answer['id']}")
        if not dies:
            await gone_from(tmp_path, SECRET)
    async with staged(tmp_path, journal=AT_ONCE) as stage:
        await gone_from(tmp_path, SECRET)
        for number, name in enumerate(kept):
            listed = await stage.ask("GET", f"/v1/conversations/{name}/items")
            assert f"Fact {number}. " in listed.body.decode()


async def test_an_item_that_is_removed_from_a_conversation_is_gone_from_all_files(tmp_path: Path) -> None:
    async with staged(tmp_path, link=told("Thanks.", "Fine."), journal=AT_ONCE) as stage:
        name = await conversation(stage, SECRET)
        path = f"/v1/conversations/{name}/items"
        answer = await stage.create("Do you know it?", conversation=name)
        listed = (await stage.ask("GET", path)).json["data"]
        (secret,) = (item["id"] for item in listed if SECRET in str(item))
        await deleted(stage, f"/v1/responses/{answer['id']}")
        await deleted(stage, f"{path}/{secret}")
        await gone_from(tmp_path, SECRET)
        left = [item["id"] for item in listed if item["id"] != secret]
        more = {"items": [{"type": "message", "role": "user", "content": "Now?"}]}
        (added,) = (await stage.ask("POST", path, more)).json["data"]
        assert added["id"] not in [item["id"] for item in listed], "ids are not given twice"
        left.insert(0, added["id"])
    async with staged(tmp_path, journal=AT_ONCE) as stage:
        again = (await stage.ask("GET", path)).json["data"]
        assert [item["id"] for item in again] == left


@pytest.mark.parametrize("restart", [False, True], ids=["in service", "after a restart"])
async def test_a_full_disk_is_left_by_deleting(small_disk: Path, restart: bool) -> None:
    """The store itself fills it, and then something else takes what is left."""
    store = small_disk / "store"
    tight = JournalSettings(reserve_bytes=2 * MIB, retry_seconds=0.01)
    made: list[Json] = []
    async with staged(store, journal=tight) as stage:
        while name := await conversation(stage, "x" * 20_000, items=10):
            made.append(name)
        assert len(made) > 20
        assert (await stage.ask("POST", "/v1/responses", {"input": "Hello!"})).status == 503
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        free = os.statvfs(small_disk)
        assert free.f_bavail * free.f_frsize < 4096
        for name in made:
            await deleted(stage, f"/v1/conversations/{name}")
        if not restart:
            await serves_again(stage)
    async with staged(store, journal=tight) as stage:
        await serves_again(stage)
        assert not holds(store, "x" * 100)


async def serves_again(stage: Stage) -> None:
    while not stage.service.state().ready:
        await asyncio.to_thread(bool)
    await stage.create("Hello!")
