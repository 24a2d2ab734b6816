"""How replies end that neither model nor client ends: at the default limit, or because they go round."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from holdfast.gateway.server import Serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.tests.threaded import serving

from .wires import LONG, Json, wire

pytestmark = pytest.mark.anyio
MOST, REPEATED = 20, 48
ROUND: Json = {"logit_bias": {"300": 100}, "max_output_tokens": "inf"}
"""Fields of a response that says one token again and again."""


@pytest.fixture(scope="module")
async def short(pocket: EngineSettings) -> AsyncIterator[Serving]:
    """A server with a default limit of `MOST` tokens, and `REPEATED` instead of 512."""
    settings = GatewaySettings(port=0, default_max_tokens=MOST, cycle_tokens=REPEATED)
    async with serving(settings, pocket) as running:
        yield running


async def test_the_default_limit_is_told_and_ends_a_reply(short: Serving) -> None:
    async with wire(short.url) as socket:
        bias = {"logit_bias": ROUND["logit_bias"]}
        await socket.send({"type": "session.update", "session": {"instructions": "Be brief."}})
        session = (await socket.until("session.updated"))[-1]["session"]
        assert session["max_output_tokens"] == MOST
        ended = await socket.say("Hello!", **bias)
        assert (ended["status"], ended["max_output_tokens"]) == ("incomplete", MOST)
        assert ended["status_details"]["reason"] == "max_output_tokens"
        assert ended["usage"]["output_tokens"] == MOST
        assert (await socket.say("Hello!", **bias, max_output_tokens=7))["usage"]["output_tokens"] == 7
        more = await socket.say("Hello!", **bias, max_output_tokens="inf")
        assert more["usage"]["output_tokens"] > MOST
        for changed, most in (("inf", "inf"), (None, MOST)):
            await socket.send({"type": "session.update", "session": {"max_output_tokens": changed}})
            assert (await socket.until("session.updated"))[-1]["session"]["max_output_tokens"] == most


async def test_a_reply_that_repeats_one_cycle_ends_for_that_reason(short: Serving) -> None:
    async with wire(short.url) as socket:
        ended = await socket.say("Hello!", **ROUND)
        assert (ended["status"], ended["status_details"]["reason"]) == ("incomplete", "repetition")
        assert ended["usage"]["output_tokens"] == REPEATED + 1, "a token, and those that repeat it"
        longer = await socket.say("Hello!", **ROUND, min_output_tokens=70)
        assert longer["usage"]["output_tokens"] == 70, "no reply ends before it may"
        ended = await socket.say("What is the capital of France?")
        assert ended["status"] == "completed", "the session goes on"


def test_a_server_ends_cycles_of_512_tokens_unless_it_is_told_not_to() -> None:
    assert (GatewaySettings().cycle_tokens, GatewaySettings().default_max_tokens) == (512, 4096)


async def test_a_running_reply_is_cancelled_by_a_truncation_in_time(short: Serving) -> None:
    async with wire(short.url) as socket:
        await socket.ask("Tell me a story.", **LONG, max_output_tokens="inf")
        begun = (await socket.until("response.output_text.delta"))[-1]
        cut = {"type": "conversation.item.truncate", "item_id": begun["item_id"], "audio_end_ms": 40}
        await socket.send(cut)
        heard = await socket.until("conversation.item.truncated")
        if not any(event["type"] == "response.done" for event in heard):
            heard += await socket.until("response.done")
        ended = next(event for event in heard if event["type"] == "response.done")["response"]
        told = next(event for event in heard if event["type"] == "conversation.item.truncated")
        assert ended["status"] == "cancelled"
        text = ended["output"][0]["content"][0]["text"]
        assert (told["text_end"], told["audio_end_ms"]) == (len(text), 40)
