"""The shipped pocket model really converses: a few conversations of each skill, none of them trained on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.benchmarks.pocket.evaluate import Judge, load
from holdfast.benchmarks.pocket.skills import SKILLS, ScoredConversation, ScoredTurn, conversations
from holdfast.benchmarks.pocket.toolbox import WEATHER, WrittenCall

SHIPPED = Path(__file__).resolve().parents[2] / "runtime" / "pocket"


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """The model on one thread: it is small, and threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load(SHIPPED)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("skill", SKILLS)
def test_a_skill_is_shown(judge: Judge, skill: str) -> None:
    wrong = [miss for talk in conversations(skill, 15, 7) for miss in judge.forced(talk)]
    assert len(wrong) <= 3, wrong


def test_a_pass_over_the_expected_replies_judges_as_holding_the_conversation_does(judge: Judge) -> None:
    for conversation in conversations("tools", 3, 11):
        assert bool(list(judge.forced(conversation))) == bool(list(judge.live(conversation)))


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")], ids=["spaces", "dense"])
@pytest.mark.parametrize("degrees", [7, -3, 18, 33])
def test_a_tools_output_is_read_in_both_spellings_of_json(
    judge: Judge, degrees: int, separators: tuple[str, str]
) -> None:
    output = json.dumps({"degrees": degrees}, separators=separators)
    call = WrittenCall("get_weather", {"city": "Oslo"})
    turn = ScoredTurn("What is the weather in Oslo?", f"It is {degrees} degrees in Oslo.", call, output, True)
    talk = ScoredConversation("tools", None, [WEATHER.schema(random.Random(0))], (turn,))
    assert not list(judge.live(talk))
