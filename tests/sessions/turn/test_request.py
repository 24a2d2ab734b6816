"""Requests and items are checked at birth: every bound, on both sides."""

from __future__ import annotations

import pytest

from holdfast.runtime.verbs import Sampling
from holdfast.sessions.conversation.items import (
    FunctionCall,
    FunctionCallOutput,
    Message,
    Preamble,
    Tool,
    checked_item,
    checked_preamble,
    new_id,
)
from holdfast.sessions.errors import ItemInvalid, SamplingInvalid, ToolInvalid
from holdfast.sessions.turn.request import RequestBounds, TurnRequest

VOCAB = 2000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")),
        ("temperature", float("inf")), ("temperature", True), ("temperature", "1"),
        ("top_p", -0.1), ("top_p", 1.1), ("top_p", -1),
        ("top_k", -1), ("top_k", 2**31), ("top_k", 1.5), ("top_k", True),
        ("seed", -1), ("seed", 2**63), ("seed", 1.0),
        ("max_output_tokens", 0), ("max_output_tokens", 2**31), ("max_output_tokens", 1.0),
        ("min_p", -0.01), ("min_p", 1.01), ("min_p", "0"), ("min_p", True),
        ("typical_p", 0), ("typical_p", 1.01), ("typical_p", None),
        ("repetition_penalty", 0.009), ("repetition_penalty", 100.1), ("repetition_penalty", float("nan")),
        ("presence_penalty", -2.01), ("presence_penalty", 2.01), ("presence_penalty", [1]),
        ("frequency_penalty", -2.01), ("frequency_penalty", 2.01), ("frequency_penalty", False),
        ("logit_bias", {VOCAB: 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: 100.1}), ("logit_bias", {1: "1"}), ("logit_bias", {True: 1.0}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)), ("logit_bias", [(1, 1.0)]),
        ("bad_words", [[]]), ("bad_words", [[VOCAB]]), ("bad_words", [[1, -1]]), ("bad_words", [[1.0]]),
        ("bad_words", [7]), ("bad_words", [""]), ("bad_words", ["x" * 257]), ("bad_words", [[1] * 129]),
        ("bad_words", [[1]] * 257), ("bad_words", ["x"] * 257), ("bad_words", [["x"]]),
        ("top_logprobs", -1), ("top_logprobs", 21), ("top_logprobs", True), ("top_logprobs", 1.0),
        ("stop_token_ids", [VOCAB]), ("stop_token_ids", [-1]), ("stop_token_ids", ["1"]),
        ("stop_token_ids", "12"), ("stop_token_ids", 5), ("stop_token_ids", [1] * 129),
        ("min_output_tokens", -1), ("min_output_tokens", 2**31), ("min_output_tokens", 1.0),
        ("tool_choice", "required"),
        ("stop", [""]), ("stop", ["x"] * 17), ("stop", ["x" * 257]), ("stop", [7]),
    ],
)  # fmt: skip
def test_values_out_of_bounds_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SamplingInvalid) as refused:
        TurnRequest.checked(bounds=RequestBounds(VOCAB), **{field: value})
    assert refused.value.param == field


@pytest.mark.parametrize(("least", "most"), [(2, 1), (2**31 - 1, 2**31 - 2)])
def test_limits_that_contradict_each_other_are_refused(least: int, most: int) -> None:
    with pytest.raises(SamplingInvalid, match="above") as refused:
        TurnRequest.checked(min_output_tokens=least, max_output_tokens=most)
    assert refused.value.param == "min_output_tokens"
    assert TurnRequest.checked(min_output_tokens=most, max_output_tokens=most).min_output_tokens == most


def test_values_at_their_bounds_are_taken() -> None:
    low = TurnRequest.checked(temperature=0, top_p=1e-9, top_k=0, seed=0, max_output_tokens=1)
    high = TurnRequest.checked(
        temperature=2,
        top_p=1,
        top_k=2**31 - 1,
        seed=2**63 - 1,
        max_output_tokens=2**31 - 1,
        stop=["x" * 256] * 16,
    )
    assert (low.sampling.temperature, low.sampling.seed) == (0.0, 0)
    assert (high.sampling.temperature, high.sampling.seed) == (2.0, 2**63 - 1)


def test_every_field_at_its_bounds_becomes_sampling() -> None:
    last = VOCAB - 1
    low = TurnRequest.checked(
        bounds=RequestBounds(VOCAB), min_p=0, typical_p=1e-9, repetition_penalty=0.01, presence_penalty=-2,
        frequency_penalty=-2, logit_bias={0: -100, last: 100}, bad_words=[[0], [last] * 64], top_logprobs=0,
        stop_token_ids=[0, last], min_output_tokens=0, seed=1,
    )  # fmt: skip
    assert low.sampling == Sampling(
        seed=1, typical_p=1e-9, repetition_penalty=0.01, presence_penalty=-2.0, frequency_penalty=-2.0,
        logit_bias=((0, -100.0), (last, 100.0)), bad_words=((0,), (last,) * 64), logprobs=0,
    )  # fmt: skip
    assert low.stop_ids == (0, last)
    high = TurnRequest.checked(
        bounds=RequestBounds(VOCAB), min_p=1, typical_p=1, repetition_penalty=100, presence_penalty=2,
        frequency_penalty=2, logit_bias=dict.fromkeys(range(1024), 0.0), top_logprobs=20,
        stop_token_ids=[1] * 64, bad_words=["x" * 256] * 255 + [[1]],
    )  # fmt: skip
    assert high.sampling.logprobs == 20 and len(high.sampling.logit_bias) == 1024
    assert (len(high.banned), high.sampling.bad_words) == (255, ((1,),))


def test_without_a_seed_each_request_draws_its_own() -> None:
    assert TurnRequest.checked().sampling.seed != TurnRequest.checked().sampling.seed


def test_overrides_stand_for_one_turn() -> None:
    default = Preamble(instructions="a", tools=(Tool(name="f"),))
    assert TurnRequest.checked().preamble(default) == default
    assert TurnRequest.checked(instructions="").preamble(default) == Preamble(tools=default.tools)
    assert TurnRequest.checked(tools=[]).preamble(default) == Preamble(instructions="a")


@pytest.mark.parametrize(
    "item",
    [
        Message(id="", role="user", text=""),
        Message(id="x" * 129, role="user", text=""),
        Message(id="a", role="robot", text=""),
        Message(id="a", role="user", text="\ud800"),
        FunctionCall(id="a", call_id="", name="f", arguments=""),
        FunctionCall(id="a", call_id="c", name="", arguments=""),
        FunctionCall(id="a", call_id="c", name="n" * 129, arguments=""),
        FunctionCallOutput(id="a", call_id="", output=""),
        FunctionCallOutput(id="a", call_id="c", output="\udfff"),
    ],
)
def test_unfit_items_are_refused(item) -> None:
    with pytest.raises(ItemInvalid):
        checked_item(item)
    with pytest.raises(ItemInvalid):
        TurnRequest.checked(input=[item])


@pytest.mark.parametrize(
    ("preamble", "error"),
    [
        (Preamble(instructions="\ud800"), ItemInvalid),
        (Preamble(tools=(Tool(name=""),)), ToolInvalid),
        (Preamble(tools=(Tool(name="n" * 129),)), ToolInvalid),
        (Preamble(tools=(Tool(name="f"), Tool(name="f"))), ToolInvalid),
        (Preamble(tools=(Tool(name="f", description="\ud800"),)), ToolInvalid),
        (Preamble(tools=(Tool(name="f", parameters={"default": 2**64}),)), ToolInvalid),
    ],
)
def test_unfit_preambles_are_refused(preamble: Preamble, error: type[Exception]) -> None:
    with pytest.raises(error):
        checked_preamble(preamble)


def test_fit_items_pass_as_they_are() -> None:
    item = Message(id=new_id("item"), role="user", text="<|im_end|> 🎉")
    assert checked_item(item) is item
