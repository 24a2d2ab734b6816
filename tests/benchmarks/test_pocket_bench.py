"""The pocket bench: what counts as right, and a run through everything on a few conversations."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from holdfast.benchmarks.pocket import bench
from holdfast.benchmarks.pocket.skills import ScoredConversation, ScoredTurn
from holdfast.benchmarks.pocket.toolbox import WrittenCall
from holdfast.sdk import ServerError
from holdfast.sdk.connection.responses import Finished
from holdfast.sdk.frames.items import FunctionCallItem
from holdfast.sdk.frames.response import KVReceipt

CALL = FunctionCallItem(name="add", arguments='{"b": 2, "a": 1}', call_id="call_1")
OTHER = FunctionCallItem(name="add", arguments='{"a": 1, "b": 3}', call_id="call_1")
SUM = ScoredTurn(
    "What is 1 plus 2?", "1 plus 2 is 9.", WrittenCall("add", {"a": 1, "b": 2}), '{"sum": 9}', scored=True
)
NAME = ScoredTurn("What is my name?", "Your name is Ana.", scored=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    ("turn", "said", "calls", "right"),
    [
        (SUM, "1 plus 2 is 9.", [CALL], True),
        (SUM, "1 plus 2 is 3.", [CALL], False),
        (SUM, "1 plus 2 is 9.", [], False),
        (SUM, "1 plus 2 is 9.", [OTHER], False),
        (SUM, "1 plus 2 is 9.", [CALL, CALL], False),
        (NAME, "Your name is Ana.", [], True),
        (NAME, "Your name is Anna.", [], False),
        (NAME, "Your name is Ana.", [CALL], False),
    ],
)
def test_right_is_right_to_the_letter(turn: ScoredTurn, said: str, calls: list, right: bool) -> None:
    assert bench._is_right(turn, said, calls) is right


def test_only_later_responses_must_prefill_exactly_what_is_new() -> None:
    def finished(prefilled: int, new: int, recomputed: int = 0) -> Finished:
        kv = KVReceipt(
            new=new, prefilled=prefilled, resident=0, recomputed=recomputed, host=0, disk=0, restore_ms=0.0
        )
        return Finished(SimpleNamespace(kv=kv, usage=SimpleNamespace(output_tokens=3)), 5.0, 9.0)

    tally = bench.SkillTally()
    tally.count(finished(1, 7), first=True)
    tally.count(finished(7, 7), first=False)
    assert tally.uneven == 0
    tally.count(finished(8, 7), first=False)
    tally.count(finished(7, 7, recomputed=2), first=False)
    assert tally.uneven == 2 and tally.responses == 4 and tally.output_tokens == 12


def test_it_measures_through_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--count", "2", "--skills", "repeat", "tools", "--sessions", "4"]) == 0
    shown = capsys.readouterr().out
    told = json.loads(shown[shown.index("{") :])
    assert {goal["name"] for goal in told["goals"]} >= {"repeat", "tools"}
    for skill in ("repeat", "tools"):
        figures = told["skills"][skill]
        assert figures["conversations"] == 2 and figures["responses"] >= 2
        assert figures["responses_not_prefilling_exactly_new"] == 0
        assert len(figures["misses"]) > 0 or figures["right"] == 2


def test_it_says_when_it_cannot_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--count", "1", "--model", "/nowhere"]) == 1
    assert "/nowhere" in capsys.readouterr().err


@pytest.mark.anyio
async def test_a_conversation_that_the_server_refuses_is_wrong_and_no_more() -> None:
    class Refusing:
        @asynccontextmanager
        async def session(self, **fields: object) -> AsyncIterator[None]:
            raise ServerError("too long", code="context_length_exceeded")
            yield

    tally = bench.SkillTally()
    await bench.hold(Refusing(), ScoredConversation("repeat", None, [], (NAME,)), tally)
    assert (tally.right, tally.wrong) == (0, 1)
    assert tally.misses[0]["said"] == "context_length_exceeded: too long"
