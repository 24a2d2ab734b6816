"""The playground in a real browser on a real server: what its buttons and keys do, and what it shows of it.

Screenshots of the playground and of the documents, in light, dark and on a phone, are left in ``build/page/``.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import connect

from holdfast.benchmarks.toys import make_adapter
from holdfast.gateway.server import Serving, bound_socket, reachable, serving
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings, Network
from holdfast.runtime.link.messages import Heartbeat, Phase
from holdfast.runtime.model.folder import POCKET_FOLDER
from holdfast.runtime.settings import EngineSettings
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.chromium import Browser, Page, chromium
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import ids, ours

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

PICTURES = Path(__file__).resolve().parents[2] / "build" / "page"
OPEN = "document.querySelector('#state').dataset.state === 'open'"
IDLE = """(({ running, asked }) => running === null && asked === null)(window.playground.client.current)
    && !document.body.classList.contains('running')"""
"""No reply runs or was asked for, and that is shown: what is seen follows a frame later."""
FORKED = """document.querySelectorAll('#tree [data-session]').length === 2
    && document.querySelector('#talk-title').textContent === 'Fork 1'"""
RUNNING = "document.body.classList.contains('running')"


@pytest.fixture(scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
async def stored(
    pocket: EngineSettings, tmp_path_factory: pytest.TempPathFactory, browser: Browser
) -> AsyncIterator[Serving]:
    """A server with all three tiers. After the browser, so that nothing loads where there is none."""
    store = tmp_path_factory.mktemp("store")
    settings = msgspec.structs.replace(pocket, store=str(store), disk_bytes=64 << 20, host_bytes=32 << 20)
    async with serving(GatewaySettings(port=0, store=store), settings) as server:
        yield server


@pytest.fixture
async def page(browser: Browser, stored: Serving) -> AsyncIterator[Page]:
    """The playground on a new session, replies greedy. At the end nothing was complained of."""
    page = await opened(browser, stored.url)
    yield page
    assert page.complaints == []
    assert all(url.startswith((stored.url, "ws", "about:")) for url in page.requests), "from elsewhere"
    await page.close()


async def opened(browser: Browser, url: str) -> Page:
    page = await browser.open(url)
    await page.resize(1280, 860)
    await page.until(OPEN)
    return page


async def say(page: Page, text: str) -> list[str]:
    """Type a message and send it by key; the texts of all items after the reply."""
    before = len(await texts(page))
    await page.click("#message")
    await page.type(text)
    await page.until(f"document.querySelector('#message').value === {json.dumps(text)}")
    await page.press("Enter")
    await page.until(f"document.querySelectorAll('.item').length >= {before + 2} && {IDLE}")
    return await texts(page)


async def texts(page: Page) -> list[str]:
    found = await page.evaluate("[...document.querySelectorAll('.item .said')].map((one) => one.textContent)")
    return list(found)


async def blocks(page: Page) -> dict[str, int]:
    """The counts that the legend shows."""
    counts = "[...document.querySelectorAll('#legend b')].map((one) => [one.dataset.count, +one.textContent])"
    return dict(await page.evaluate(counts))


async def all_in(page: Page, tier: str) -> int:
    """Wait until the map shows every block in one tier; how many."""
    cells = "[...document.querySelectorAll('#blocks i')]"
    return int(
        await page.until(
            f"({cells}.length > 1 && {cells}.every((cell) => cell.dataset.tier === '{tier}')) && {cells}.length"
        )
    )


async def kept(page: Page, selector: str) -> str:
    """The text of the last item that ``selector`` finds, as the server has it, without the white space around
    it, which Markdown does not show: a reply may be cut behind a space."""
    text = f"""(async () => {{
        const {{ client }} = window.playground;
        const item_id = [...document.querySelectorAll({json.dumps(selector)})].at(-1).dataset.id;
        const event = {{ type: "conversation.item.retrieve", item_id }};
        const answer = await client.request(client.current, event, "conversation.item.retrieved");
        return answer.item.content[0].text;
    }})()"""
    return str(await page.evaluate(text)).strip()


async def setting(page: Page, **fields: Any) -> None:
    """Fill fields of the session's form, and apply them."""
    await page.evaluate("document.querySelector('#session-card').open = true")
    for name, value in fields.items():
        await page.evaluate(
            f"document.querySelector('#{name.replace('_', '-')}').value = {json.dumps(value)}"
        )
    await page.click("#session-form button[type=submit]")


async def long_replies(page: Page) -> None:
    await setting(page, least_tokens="600", temperature="0")
    await page.until("document.querySelector('#least-tokens').value === '600'")


async def test_a_turn_is_typed_ahead_and_answered(page: Page) -> None:
    assert (await say(page, "My name is Marisol."))[-1]
    said = await say(page, "What is my name?")
    assert "Marisol" in said[-1]
    receipt = await page.text(".receipt:last-child")
    assert "first token after" in receipt and "on the device" in receipt
    assert "tokens were computed while you typed" in await page.text("#typing")
    assert await page.evaluate("document.querySelectorAll('#ttft-chart .streamed').length") == 2
    await page.click("#streamed")
    await say(page, "And who am I?")
    assert await page.text("#typing") == ""
    assert await page.evaluate("document.querySelectorAll('#ttft-chart .whole').length") == 1
    assert "typed ahead" in await page.text("#ttft-figures") and "sent whole" in await page.text(
        "#ttft-figures"
    )


async def test_text_that_is_changed_while_it_is_typed_arrives_as_it_stands(page: Page) -> None:
    await page.click("#message")
    await page.type("My name is Marlon")
    for _ in "rlon":
        await page.press("Backspace")
    await page.type("risol.")
    await page.press("Enter")
    await page.until(f"document.querySelectorAll('.item').length === 2 && {IDLE}")
    assert (await texts(page))[0] == "My name is Marisol."
    assert "Marisol" in (await say(page, "What is my name?"))[-1]


async def test_a_receipt_adds_up_where_typed_text_was_changed(page: Page) -> None:
    await say(page, "My name is Marisol.")
    before = int(await page.until("+document.querySelector('[data-count=device]').textContent"))
    await page.click("#message")
    await page.type("Count from 1 to 40, and then tell me all that you know of foxes and of owls.")
    asked = "window.playground.client.askBlocks(window.playground.client.current)"
    shown = f"+document.querySelector('[data-count=device]').textContent > {before}"
    await page.until(f"({asked}, {shown})")  # so much was computed of what is typed
    await page.evaluate("document.querySelector('#message').select()")
    await page.type("What is my name?")
    await page.press("Enter")
    await page.until(f"document.querySelectorAll('.item').length === 4 && {IDLE}")
    said = await page.text(".receipt:last-child")
    whole, parts = re.findall(r"(\d+) prompt tokens: (.*?) · \d+ more computed, for typed text", said)[0]
    assert sum(map(int, re.findall(r"\d+", parts))) == int(whole), said


async def test_blocks_that_others_have_too_are_named_so_and_stay_on_the_device(page: Page) -> None:
    await say(page, "My name is Petronella. " * 4)
    await page.click("#fresh")
    await page.until(f"{OPEN} && document.querySelectorAll('.item').length === 0")
    await say(page, "My name is Petronella. " * 4)
    await page.until("+document.querySelector('[data-count=shared]').textContent >= 2")
    assert "also in other sessions" in await page.text("#legend")
    await page.click("#to-disk")
    await page.until("document.querySelector('#moved').textContent.includes('other sessions have them, too')")
    assert (await blocks(page))["device"] >= 2 and (await blocks(page))["disk"] >= 1
    await say(page, "What is my name?")
    assert await page.text("#moved") == "", "it told of the past"


async def test_blocks_move_after_settle_and_stage(page: Page) -> None:
    await say(page, "Count from 1 to 40.")
    await all_in(page, "device")
    counts = set()
    for control, tier in (("#to-host", "host"), ("#to-disk", "disk"), ("#to-device", "device")):
        await page.click(control)
        await page.until("document.querySelector('#moved').textContent.includes(' ms')")
        counts.add(await all_in(page, tier))
        assert (await blocks(page))[tier] in counts and len(counts) == 1
    await page.click("#to-disk")
    await all_in(page, "disk")
    await say(page, "What is my name?")
    assert "from disk" in await page.text(".receipt:last-child")
    await page.evaluate("document.querySelector('#measure-panel details').open = true")
    await page.until("document.querySelector('#blocks-runs').textContent.includes('device')")


async def test_a_fork_has_what_came_before_and_shares_its_blocks(page: Page) -> None:
    await say(page, "My name is Marisol. " * 4)
    await page.click("#fork")
    await page.until(FORKED)
    await page.until("+document.querySelector('[data-count=shared]').textContent >= 2")
    assert len(await texts(page)) == 2
    assert "Marisol" in (await say(page, "What is my name?"))[-1]
    await page.until("document.querySelectorAll('#blocks .shared').length >= 2")
    await page.until("document.querySelectorAll('#blocks i:not(.shared)').length > 0")
    await page.press("Escape")  # out of the message box
    await page.press("[")
    await page.until("document.querySelectorAll('.item').length === 2")
    assert "My name is Bella" in (await say(page, "My name is Bella."))[-2]
    await page.click("#tree ul ul .branch, #tree ul .branch")
    await page.until("document.querySelectorAll('.item').length === 4")
    assert "Marisol" in (await texts(page))[-1]
    await page.click("#tree ul [data-act=name]")
    await page.type("with Marisol")
    await page.press("Enter")
    await page.until("document.querySelector('#talk-title').textContent === 'with Marisol'")
    await page.click("#tree ul [data-act=prune]")
    await page.click("#sure .primary")
    await page.until("document.querySelectorAll('#tree [data-session]').length === 1")
    await page.until("document.querySelectorAll('.item').length === 4 && document.title === 'Holdfast'")


async def test_a_fork_in_the_middle_of_a_reply_has_what_had_come(page: Page) -> None:
    await long_replies(page)
    await page.click("#message")
    await page.type("Tell me the story of the fox.")
    await page.press("Enter")
    await page.until("document.querySelector('.item.assistant .said')?.textContent.length > 20")
    await page.click("#fork")
    await page.until(f"document.querySelector('#talk-title').textContent === 'Fork 1' && {IDLE}")
    await page.until("document.querySelector('.item.assistant.incomplete')")
    assert len((await texts(page))[1]) > 20
    assert await kept(page, ".item.assistant") == (await texts(page))[1]
    await page.click("#tree [data-act=open]")
    await page.until(f"document.querySelector('#talk-title').textContent === 'Main' && {RUNNING}")
    await page.click("#interrupt")
    await page.until(IDLE)


async def test_an_interrupted_reply_ends_where_it_was_shown(page: Page) -> None:
    await long_replies(page)
    await page.click("#message")
    await page.type("Tell me the story of the fox.")
    await page.press("Enter")
    await page.until("document.querySelector('.item.assistant .said')?.textContent.length > 20")
    await page.press("Escape")
    await page.until(f"{IDLE} && document.querySelector('.receipt[data-status=cancelled]')")
    assert "Interrupted here" in await page.text(".receipt")
    cut = (await texts(page))[-1]
    assert await kept(page, ".item.assistant") == cut and 20 <= len(cut) < 600
    assert len(await texts(page)) == 2


async def test_a_reply_is_steered(page: Page) -> None:
    await say(page, "My name is Marisol.")
    await long_replies(page)
    await page.click("#message")
    await page.type("Tell me the story of the fox.")
    await page.press("Enter")
    await page.until("document.querySelectorAll('.item.assistant')[1]?.textContent.length > 20")
    assert await page.text("#send") == "Steer"
    await page.type("What is my name?")
    await page.press("Enter")
    await page.until("document.querySelectorAll('.item.user').length === 3")
    await page.until("document.querySelectorAll('.item.assistant').length === 3")
    await page.click("#interrupt")
    await page.until(IDLE)
    assert "Steered here" in await page.text(".receipt[data-status=incomplete]")


async def test_rewind_edit_and_try_again(page: Page) -> None:
    await say(page, "My name is Marisol.")
    await say(page, "My name is Bella.")
    await page.click(".item.assistant .small button:nth-child(2)")  # rewind to the first reply
    await page.until("document.querySelector('#sure-text').textContent.startsWith('2 items')")
    await page.click("#sure .primary")
    await page.until("document.querySelectorAll('.item').length === 2")
    assert "Marisol" in (await say(page, "What is my name?"))[-1]
    await page.click("#retry")
    await page.until(f"window.playground.client.current.turns.length === 4 && {IDLE}")
    assert len(await texts(page)) == 4
    assert "Marisol" in (await texts(page))[-1]
    await page.click(".item.user .small button:nth-child(3)")  # edit the first message
    await page.click("#sure .primary")
    await page.until("document.querySelector('#message').value === 'My name is Marisol.'")
    await page.until("!document.querySelector('.item')")
    for _ in "Marisol.":
        await page.press("Backspace")
    await page.type("Bella.")
    await page.press("Enter")
    await page.until(f"document.querySelectorAll('.item').length === 2 && {IDLE}")
    assert "Bella" in (await say(page, "What is my name?"))[-1]


async def test_going_back_to_the_start_asks_first_and_can_keep_a_fork(page: Page) -> None:
    await say(page, "My name is Marisol.")
    await page.click("#clear")
    await page.until("document.querySelector('#sure').open")
    await page.press("Escape")
    await page.until("!document.querySelector('#sure').open")
    assert "Marisol" in (await say(page, "What is my name?"))[-1], "nothing is gone"
    await page.click("#clear")
    await page.click("#sure button:nth-child(2)")
    await page.until("!document.querySelector('#empty').hidden")
    await page.until("document.querySelectorAll('#tree [data-session]').length === 2")
    await page.click("#tree ul .branch")
    await page.until("document.querySelectorAll('.item').length === 4")


async def test_a_message_that_was_sent_is_no_draft_and_one_that_was_written_is(page: Page) -> None:
    await say(page, "My name is Marisol.")
    await page.reload()
    await page.until(f"{OPEN} && document.querySelectorAll('.item').length === 2")
    assert await page.evaluate("document.querySelector('#message').value") == ""
    await page.click(".item.user .small button:nth-child(3)")
    await page.until("document.querySelector('#message').value === 'My name is Marisol.'")
    await page.reload()
    await page.until(OPEN)
    assert await page.evaluate("document.querySelector('#message').value") == "My name is Marisol."


async def test_the_sample_that_needs_a_tool_has_it(page: Page) -> None:
    await page.click("#samples button:last-child")
    await page.until("document.activeElement.id === 'message' && document.querySelector('#message').value")
    await page.press("Enter")
    await page.until("document.querySelector('.answer textarea')?.value.includes('temperature')")


async def listed(page: Page) -> list[str]:
    """The names of the conversations in the list."""
    return list(
        await page.evaluate(
            "[...document.querySelectorAll('#conversations .name')].map((one) => one.textContent)"
        )
    )


async def test_a_conversation_of_the_list_is_opened_again_and_deleted(page: Page, stored: Serving) -> None:
    await page.evaluate("localStorage.clear()")  # of other tests
    await say(page, "My name is Marisol.")
    await page.click("#fork")
    await page.until(FORKED)
    await say(page, "What is my name?")
    left = json.loads(await page.evaluate("JSON.stringify(window.playground.client.current.saved())"))
    await page.evaluate("void (window.left = window.playground.client.current)")
    await page.click("#fresh")
    await page.until(f"{OPEN} && document.querySelectorAll('.item').length === 0")
    await page.evaluate("window.playground.client.askBlocks(window.left)")  # as its map does, a little later
    await long_replies(page)
    await page.click("#message")
    await page.type("Tell me the story of the fox.")
    await page.press("Enter")
    await page.until("document.querySelector('.item.assistant .said')?.textContent.length > 20")
    assert await page.evaluate("document.querySelectorAll('.toast').length") == 0
    await page.until("document.querySelectorAll('#conversations li').length === 2")
    await page.click("#conversations li:not(:has(.current)) .branch")  # away from a reply that runs
    await page.until(f"{OPEN} && document.querySelectorAll('.item').length === 4")
    assert (await texts(page))[0] == "My name is Marisol." and "Marisol" in (await texts(page))[-1]
    assert await page.text("#talk-title") == "Fork 1"
    assert await page.evaluate("document.querySelectorAll('.receipt').length") == 2
    assert "Marisol" in (await say(page, "And what is my name?"))[-1], "it goes on"
    await page.reload()
    await page.until(f"{OPEN} && document.querySelectorAll('.item').length === 6")
    assert await listed(page) == ["My name is Marisol.", "Tell me the story of the fox."]
    assert (await page.text("#conversations .about")).endswith(" · And what is my name?")
    await page.click("#conversations li:last-child .branch")
    await page.until(f"{OPEN} && document.querySelectorAll('.item').length === 2")
    await page.until("document.querySelector('.item.assistant .said').textContent.length > 20")
    if await page.evaluate(RUNNING):
        await page.press("Escape")
        await page.until(IDLE)
    assert (await texts(page))[-1] == await kept(page, ".item.assistant"), "each character once"
    await page.until("document.querySelectorAll('#tree li').length === 1")  # those of the other are gone
    await page.click("#conversations li:not(:has(.current)) .small button")
    await page.until("document.querySelector('#sure-text').textContent.includes('Marisol')")
    await page.click("#sure .primary")
    await page.until("document.querySelectorAll('#conversations li').length === 1")
    url = stored.url.replace("http", "ws", 1) + "/v1/realtime?resumable=true&resume=true"
    async with connect(url, compression=None, proxy=None) as socket:
        await socket.send(json.dumps({"type": "session.resume", "handle": left["handle"]}))
        assert json.loads(await socket.recv())["error"]["code"] == "session_not_found", "the fork is deleted"
    await page.click("#conversations .small button")  # the one that is open
    await page.click("#sure .primary")
    await page.until("!document.querySelector('#no-conversations').hidden")
    await page.until(f"{OPEN} && document.querySelectorAll('.item').length === 0")


async def test_a_tool_answers_in_the_page_and_its_output_can_be_edited(page: Page) -> None:
    await page.evaluate("document.querySelector('#tools-card').open = true")
    await page.click("#tool-get_weather")
    await page.until("document.querySelector('#tools-on').textContent === '1 on'")
    await page.click("#message")
    await page.type("What is the weather in Oslo?")
    await page.press("Enter")
    await page.until("document.querySelector('.answer textarea')?.value.includes('temperature')")
    assert await page.text(".item.call code") == "get_weather"
    edited = json.dumps({"temperature": 7, "sky": "cloudy"})
    await page.evaluate(
        f"""(() => {{
            const box = document.querySelector('.answer textarea');
            box.value = {json.dumps(edited)};
            box.dispatchEvent(new Event('input', {{ bubbles: true }}));
        }})()"""
    )
    await page.click(".answer .primary")
    await page.until(f"document.querySelectorAll('.item').length === 4 && {IDLE}")
    _, _, output, reply = await texts(page)
    assert json.loads(output) == json.loads(edited) and "7" in reply
    await page.click("#answer-at-once")
    await page.click("#message")
    await page.type("What is the weather in Rome?")
    await page.press("Enter")
    await page.until(f"document.querySelectorAll('.item').length === 8 && {IDLE}")


async def test_the_calculator_computes_what_a_forced_call_asks(page: Page) -> None:
    await page.evaluate("document.querySelector('#tools-card').open = true")
    await page.click("#tool-calculator")
    await page.until("document.querySelector('#tool-choice').options.length === 4")
    await page.evaluate(
        """(() => {
            const box = document.querySelector('#tool-choice');
            box.value = 'calculator';
            box.dispatchEvent(new Event('change', { bubbles: true }));
        })()"""
    )
    await page.click("#message")
    await page.type("What is 12 plus 30?")
    await page.press("Enter")
    await page.until(f"document.querySelector('.answer textarea')?.value && {IDLE}")
    assert await page.text(".item.call code") == "calculator"
    assert set(json.loads(await page.evaluate("document.querySelector('.answer textarea').value"))) <= {
        "result",
        "error",
    }
    computed = await page.evaluate(
        "import(new URL('page/tools.js', document.baseURI)).then(({ outputOf }) => ["
        "outputOf('calculator', '{\"expression\": \"(12 + 30) * 2 - 2 ^ 3 / 4\"}'),"
        "outputOf('calculator', '{\"expression\": \"alert(1)\"}'), outputOf('clock', '{\"zone\": \"UTC\"}')])"
    )
    assert json.loads(computed[0]) == {"result": 82}
    assert "error" in json.loads(computed[1]) and json.loads(computed[2])["zone"] == "UTC"


async def test_a_reply_fits_the_schema_in_the_box(page: Page) -> None:
    await page.evaluate("document.querySelector('#format-card').open = true")
    for wrong, schema in (
        (True, "{"),
        (
            False,
            '{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],'
            ' "additionalProperties": false}',
        ),
    ):
        await page.evaluate(
            f"""(() => {{
                const choice = document.querySelector('#format');
                choice.value = 'json_schema';
                choice.dispatchEvent(new Event('change', {{ bubbles: true }}));
                const box = document.querySelector('#format-text');
                box.value = {json.dumps(schema)};
                box.dispatchEvent(new Event('input', {{ bubbles: true }}));
            }})()"""
        )
        assert bool(await page.text("#format-error")) is wrong
    assert json.loads((await say(page, "One or two?"))[-1])["n"] in (1, 2)


async def test_a_reload_in_the_middle_of_a_reply_goes_on_where_it_was(page: Page) -> None:
    await say(page, "My name is Marisol.")
    await page.click("#fork")
    await page.until(FORKED)
    await long_replies(page)
    await page.click("#message")
    await page.type("Tell me the story of the fox.")
    await page.press("Enter")
    await page.until("document.querySelectorAll('.item.assistant .said')[1]?.textContent.length > 40")
    await page.reload()
    await page.until(OPEN)
    await page.until("document.querySelectorAll('.item').length === 4")
    assert (await texts(page))[0] == "My name is Marisol."
    read = len((await texts(page))[3])
    assert read > 40
    await page.until(
        f"document.querySelectorAll('.item.assistant .said')[1].textContent.length > {read + 40}"
    )
    await page.press("Escape")
    await page.until(IDLE)
    assert (await texts(page))[-1] == await kept(page, ".item.assistant"), "each character once"
    assert await page.evaluate("document.querySelectorAll('#tree [data-session]').length") == 2


async def test_a_cut_connection_comes_back_to_its_session(page: Page) -> None:
    await say(page, "My name is Marisol.")
    await page.click("#message")
    await page.type("Wh")
    await page.evaluate("(window.old = window.playground.client._socket).close(4900)")
    await page.type("at is my ")
    await page.until(f"window.playground.client._socket !== window.old && {OPEN}")
    await page.type("name?")
    await page.press("Enter")
    await page.until(f"document.querySelectorAll('.item').length === 4 && {IDLE}")
    assert (await texts(page))[2] == "What is my name?" and "Marisol" in (await texts(page))[3]
    await page.evaluate("(window.old = window.playground.client._socket).close(4900)")
    await page.until("document.querySelector('#state').dataset.state === 'waiting'")
    await page.type("My name is Bella.")
    await page.press("Enter")
    await page.until(f"document.querySelectorAll('.item').length === 6 && {OPEN} && {IDLE}")
    assert (await texts(page))[4] == "My name is Bella."
    assert "Bella" in (await say(page, "What is my name?"))[-1]


async def test_a_session_that_another_client_took_can_be_taken_back(page: Page, stored: Serving) -> None:
    await say(page, "My name is Marisol.")
    handle = await page.evaluate("window.playground.client.current.handle")
    url = stored.url.replace("http", "ws", 1) + "/v1/realtime?resumable=true&resume=true"
    async with connect(url, compression=None, proxy=None) as socket:
        await socket.send(json.dumps({"type": "session.resume", "handle": handle}))
        assert json.loads(await socket.recv())["type"] == "session.resumed"
        await page.until("document.querySelector('#state').dataset.state === 'moved'")
        await page.click(".toast button")
        await page.until(OPEN)
    assert "Marisol" in (await say(page, "What is my name?"))[-1]


async def test_another_session_begins_empty(page: Page) -> None:
    await say(page, "My name is Marisol.")
    before = await page.evaluate("window.playground.client.current.id")
    await page.click("#fresh")
    await page.until(f"{OPEN} && window.playground.client.current?.id !== '{before}'")
    assert await texts(page) == []
    assert "Marisol" not in (await say(page, "What is my name?"))[-1]


async def test_it_works_by_keyboard_alone(page: Page) -> None:
    await page.press("/")
    await page.type("My name is Marisol.")
    await page.press("Enter")
    await page.until(f"document.querySelectorAll('.item').length === 2 && {IDLE}")
    await page.press("Escape")
    await page.press("?")
    await page.until("document.querySelector('#help').open")
    await page.press("Escape")
    await page.until("!document.querySelector('#help').open")
    await page.press("f")
    await page.until(FORKED)
    await page.press("s")
    assert await page.evaluate("document.querySelector('#streamed').checked") is False
    await page.evaluate("document.activeElement.blur()")
    seen = set()
    for _ in range(60):
        await page.press("Tab")
        seen.add(await page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert {"message", "streamed", "fork", "retry", "to-disk", "to-device", "theme", "Fork here"} <= seen
    nameless = """[...document.querySelectorAll('button, input, textarea, select, a')].filter((one) =>
        !one.textContent.trim() && !one.labels?.length && !one.ariaLabel && !one.hidden
    ).map((one) => one.outerHTML)"""
    assert await page.evaluate(nameless) == []


async def test_the_theme_follows_the_system_and_the_switch(page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    await page.prefer("light")
    light = await page.evaluate(ground)
    await page.prefer("dark")
    dark = await page.evaluate(ground)
    assert light != dark
    await page.click("#theme")
    assert await page.evaluate(ground) == light, "light, whatever the system prefers"
    await page.click("#theme")
    await page.prefer("light")
    assert await page.evaluate(ground) == dark
    await page.reload()
    assert await page.evaluate(ground) == dark, "kept"
    await page.click("#theme")
    assert await page.text("#theme .words") == "Theme: system"


async def test_on_a_phone_every_part_fits_the_width(page: Page) -> None:
    await page.resize(360, 740, phone=True)
    await say(page, "My name is Marisol. " * 5 + "a" * 60)
    for part in ("tree", "blocks", "setup", "talk"):
        await page.click(f".tabs [data-tab={part}]")
        await page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        assert await page.overflow() <= 0, part
        wide = """[...document.querySelectorAll('body *')].filter((one) => one.checkVisibility() &&
            one.getBoundingClientRect().right > innerWidth + 1 && !one.closest('#wire, .hidden, .skip')
        ).map((one) => one.id || one.className)"""
        assert await page.evaluate(wide) == [], part
        small = """[...document.querySelectorAll('button, .button, summary, select, .switch')].filter((one) => {
            const { width, height } = one.getBoundingClientRect();
            return one.checkVisibility() && Math.min(width, height) < 40;
        }).map((one) => one.outerHTML)"""
        assert await page.evaluate(small) == [], part
    assert await page.evaluate("document.querySelector('#message').checkVisibility()")
    await page.evaluate("""for (const detail of ['One.', 'Two.', 'Two.'])
        window.playground.client.dispatchEvent(new CustomEvent('notice', { detail }))""")
    for size in ((360, 740), (1280, 860)):
        await page.resize(*size)
        covered = """[...document.querySelectorAll('#composer :is(textarea, button), header button, .tabs *')]
            .filter((one) => one.checkVisibility()).filter((one) => {
                const { x, y, width, height } = one.getBoundingClientRect();
                return !one.contains(document.elementFromPoint(x + width / 2, y + height / 2));
            }).map((one) => one.id)"""
        assert await page.evaluate(covered) == [], "a toast lies over it"
    assert await page.evaluate("document.querySelectorAll('.toast').length") == 2, "the same is said once"


async def test_the_documents_show_every_route_and_event(browser: Browser, stored: Serving) -> None:
    page = await browser.open(f"{stored.url}/docs#send.session.blocks.listed")
    await page.until("document.querySelector('#send\\\\.session\\\\.blocks\\\\.listed table')")
    assert "block_tokens" in await page.text("#send\\.session\\.blocks\\.listed")
    listed = await page.evaluate(
        "[...document.querySelectorAll('.entry .title')].map((one) => one.textContent)"
    )
    assert {"/v1/models", "/health", "session.fork", "response.done", "BlockRun"} <= set(listed)
    await page.evaluate("for (const one of document.querySelectorAll('.entry')) one.open = true")
    await page.until("[...document.querySelectorAll('.entry')].every((one) => one.querySelector('.body'))")
    broken = """[...document.querySelectorAll('a[href^="docs#"]')]
        .map((one) => decodeURIComponent(one.getAttribute('href').slice(5)))
        .filter((id) => !document.getElementById(id))"""
    assert await page.evaluate(broken) == []
    await page.click("#filter")
    await page.type("session fork")
    shown = await page.until(
        "(() => { const left = [...document.querySelectorAll('.entry:not([hidden]) .title')]"
        ".map((one) => one.textContent); return left.length < 12 && left; })()"
    )
    assert "session.fork" in shown
    await page.resize(360, 740, phone=True)
    assert await page.overflow() <= 0
    assert page.complaints == []
    await page.close()


async def test_a_server_with_keys_is_asked_with_the_key_that_the_user_gives(
    browser: Browser, pocket: EngineSettings
) -> None:
    """Behind a prefix, as a proxy may have it."""
    settings = GatewaySettings(port=0, api_key="sk-page-1", network=Network(root_path="/holdfast"))
    async with serving(settings, pocket) as server:
        page = await browser.open(f"{server.url}/holdfast")
        await page.until("document.querySelector('#key-dialog').open")
        for key, valid in (("sk-wrong", False), ("sk-page-1", True)):
            await page.click("#key")
            await page.type(key)
            await page.press("Enter")
            if not valid:
                await page.until("document.querySelector('#key-error').textContent")
        await page.until(OPEN)
        assert await say(page, "Hello!")
        assert not any("sk-page" in url for url in page.requests), "the key is in no address"
        await page.reload()
        await page.until(f"{OPEN} && document.querySelectorAll('.item').length === 2")
        assert all("401" in complaint for complaint in page.complaints)
        await page.go(f"{server.url}/holdfast/docs")
        await page.until("document.querySelector('.entry')")
        await page.close()


async def test_an_adapter_is_chosen_for_a_new_session(
    browser: Browser, pocket: EngineSettings, tmp_path: Path
) -> None:
    make_adapter(tmp_path, POCKET_FOLDER, rank=8, strength=3.0)
    adapted = msgspec.structs.replace(pocket, enable_lora=True, lora_modules=(f"sql={tmp_path}",))
    async with serving(GatewaySettings(port=0), adapted) as server:
        page = await opened(browser, server.url)
        await page.until("!document.querySelector('#adapter').hidden")
        names = await page.evaluate("[...document.querySelector('#adapter').options].map((one) => one.value)")
        assert (
            names[1:] == ["sql"]
            and await page.evaluate("document.querySelector('#model').textContent") != "sql"
        )
        choose = "choice.value = 'sql', choice.dispatchEvent(new Event('change'))"
        await page.evaluate(
            f"(({{ choice }}) => ({choose}))({{ choice: document.querySelector('#adapter') }})"
        )
        await page.until(f"{OPEN} && document.querySelector('#model').textContent === 'sql'")
        assert await say(page, "Hello!")
        await page.reload()
        await page.until(f"{OPEN} && document.querySelector('#model').textContent === 'sql'")
        assert page.complaints == []
        await page.close()


USER, MODEL = (ids("chatml", f"<|im_start|>{role}\n") for role in ("user", "assistant"))


def repeated(tokens: list[int]) -> int:
    """The user's last message, word for word; then the end."""

    def behind(marks: list[int]) -> int:
        return max(at for at in range(len(tokens)) if tokens[at : at + len(marks)] == marks) + len(marks)

    said = tokens[behind(USER) :]
    return said[: said.index(END) + 1][len(tokens) - behind(MODEL)]


WRITTEN = """# Title

Some **bold** and *slanted* words, `code`, https://ok.example/a_b_c
and a second line.

7. one
8. two

> قال نعم

| a | b |
|---|--:|
| 1 | 2 |

שלום **world**

```js
let x = "<b>";
```
"""
ATTACKS = """<script>hacked = 1</script> <img src=x onerror="hacked = 2"> <iframe src=//evil.example></iframe>
![a](https://evil.example/a.png) ![b](x" onerror="hacked=3)

[c](javascript:hacked=4) [d](JaVa&#115;cript:hacked=5) [e](data:text/html,hacked) [f](vbscript:x) [g](docs)
<javascript:hacked=6> <a href="javascript:hacked=7">h</a> <div id="message" style="all:unset">i</div>

[j]: javascript:hacked=8
[j]

```x"><img src=y onerror=hacked=9>
</code></pre><script>hacked = 10</script>"""


async def test_what_a_model_writes_is_shown_as_markdown_in_which_nothing_runs(browser: Browser) -> None:
    settings, link = GatewaySettings(port=0), Scripted(repeated, END)
    service = Service(settings, "scripted", link)
    service.open(SessionRegistry(link, Language.of(ours("chatml"))))
    with bound_socket(settings) as sock:
        async with reachable(service, sock) as url:
            page = await opened(browser, url)
            for text in (WRITTEN, ATTACKS):
                await page.evaluate(f"document.querySelector('#message').value = {json.dumps(text)}")
                await page.evaluate("document.querySelector('#message').dispatchEvent(new Event('input'))")
                await page.click("#send")
                await page.until(f"window.playground.client.current.turns.at(-1)?.ended && {IDLE}")
            written, attacks = (
                "document.querySelector('.item.assistant .said')",
                ".item.assistant:not(:has(h1))",
            )
            assert (await texts(page))[0] == WRITTEN, "of the user: as it was typed"
            assert await page.evaluate(f"[...{written}.children].map((one) => one.tagName)") == [
                *("H1", "P", "OL", "BLOCKQUOTE", "DIV", "P", "PRE")
            ]
            shown = await page.evaluate(
                f"""[...{written}.querySelectorAll('strong, em, code, a, [start], [align], br')].map((one) =>
                    one.outerHTML.replace(/<ol (.*?) [^]*/, '$1'))"""
            )
            assert shown == [
                "<strong>bold</strong>",
                "<em>slanted</em>",
                "<code>code</code>",
                '<a href="https://ok.example/a_b_c" target="_blank" rel="noopener noreferrer">'
                "https://ok.example/a_b_c</a>",
                "<br>",
                'start="7"',
                '<th align="right">b</th>',
                '<td align="right">2</td>',
                "<strong>world</strong>",
                '<code>let x = "&lt;b&gt;";\n</code>',
            ]
            sides = f"[...{written}.children].map((one) => getComputedStyle(one).direction).join()"
            assert await page.evaluate(sides) == "ltr,ltr,ltr,rtl,ltr,rtl,ltr"
            for box in ("#message", ".item.user .said", "#instructions"):
                assert await page.evaluate(f"document.querySelector('{box}').dir") == "auto"
            hrefs = f"[...document.querySelectorAll('{attacks} a')].map((one) => one.getAttribute('href'))"
            assert await page.evaluate(hrefs) == ["https://evil.example/a.png", None]
            tags = (
                f"[...new Set([...document.querySelectorAll('{attacks} .said *')].map((one) => one.tagName))]"
            )
            assert await page.evaluate(tags) == ["P", "BR", "A", "PRE", "CODE"]
            assert "hacked = 10</script>" in (await texts(page))[-1]
            assert await page.evaluate("'hacked' in window") is False
            assert page.complaints == [] and not any("evil" in one for one in page.requests)
            await page.close()
            await service.close()


async def test_markdown_that_grows_keeps_the_elements_of_what_is_done(page: Page) -> None:
    """A long reply would else be made anew with each token. What it shows at the end is as of the whole."""
    grown = """import(new URL('page/markdown.js', document.baseURI)).then(async ({ Markdown }) => {
        const part = 'A paragraph.\\n\\n1. one\\n\\n2. two\\n\\n```\\ncode\\n\\n    more\\n```\\n\\n';
        const text = part.repeat(40).slice(0, -8); // in a fence that is not closed
        const [element, whole] = [document.createElement('div'), document.createElement('div')];
        const growing = new Markdown(element), seen = new Set();
        let shown = 0;
        for (let end = 1; end <= text.length; end += 40) {
            await new Promise(requestAnimationFrame);
            shown += growing.show(text.slice(0, end), false);
            for (const block of element.children) seen.add(block);
        }
        growing.show(text, true);
        new Markdown(whole).show(text, true);
        const made = seen.size - element.children.length; // of those that could still change
        return [element.innerHTML === whole.innerHTML, element.children.length, made <= 2 * shown, shown > 3];
    })"""
    assert await page.evaluate(grown) == [True, 120, True, True]


class Loads(Scripted):
    """An engine that compiles until it is ready."""

    ready, phase = False, Phase.COMPILING
    heartbeat = Heartbeat(Phase.COMPILING, 300.0, "compiling decoding", 0.5)


async def test_a_server_that_loads_shows_its_phase_until_it_is_ready(browser: Browser) -> None:
    settings, link = GatewaySettings(port=0), Loads(spoken, END)
    service = Service(settings, "scripted", link)
    with bound_socket(settings) as sock:
        async with reachable(service, sock) as url:
            page = await browser.open(url)
            await page.resize(1280, 860)
            await page.until("document.querySelector('#loading')?.checkVisibility()")
            assert "Compiling kernels: compiling decoding" in await page.text("#loading-phase")
            assert await page.evaluate("document.querySelector('#loading-share').value") == 0.5
            assert "getting ready" in await page.evaluate("document.querySelector('#message').placeholder")
            samples = "[...document.querySelectorAll('#samples button')].map((one) => one.disabled)"
            assert set(await page.evaluate(samples)) == {True}, "they would do nothing"
            await page.screenshot(PICTURES / "loading.png")
            link.ready, link.phase, link.heartbeat = True, Phase.IDLE, None
            service.open(SessionRegistry(link, Language.of(ours("chatml"))))
            await page.until(f"{OPEN} && !document.querySelector('#message').disabled")
            assert await page.evaluate("document.querySelector('#loading').hidden")
            assert set(await page.evaluate(samples)) == {False}
            assert await page.evaluate("document.querySelector('#message').placeholder") == "Message"
            await page.close()
            await service.close()


async def test_pictures(page: Page) -> None:
    """What an engineer looks at. It only has to be there."""
    await say(page, "My name is Petra. " * 3)  # other sessions here begin otherwise, so it shares no block
    await say(page, "What is 12 plus 30?")
    await page.click("#to-disk")
    await all_in(page, "disk")
    await say(page, "Tell me the story of the fox.")
    await page.click("#fork")
    await page.until(FORKED)
    await page.click("#streamed")
    await say(page, "What is my name?")
    await page.until("document.querySelectorAll('#blocks .shared').length >= 2")
    for scheme in ("light", "dark"):
        await page.prefer(scheme)
        await page.screenshot(PICTURES / f"{scheme}.png")
        await page.resize(360, 740, phone=True, scale=2)
        for part in ("talk", "tree", "blocks", "setup"):
            await page.click(f".tabs [data-tab={part}]")
            await page.screenshot(PICTURES / f"phone-{scheme}-{part}.png")
        await page.click(".tabs [data-tab=talk]")
        await page.resize(1280, 860)
    await page.go(await page.evaluate("new URL('docs#receive.session.fork', document.baseURI).href"))
    await page.until("document.querySelector('.entry[open] .body')")
    for scheme in ("light", "dark"):
        await page.prefer(scheme)
        await page.screenshot(PICTURES / f"docs-{scheme}.png")
    await page.resize(360, 740, phone=True, scale=2)
    await page.screenshot(PICTURES / "docs-phone.png")
    assert len(list(PICTURES.glob("*.png"))) >= 13
