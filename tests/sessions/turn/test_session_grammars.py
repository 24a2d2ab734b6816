"""Grammars of a turn: which a request makes, that every engine is given it, how it fails, what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from holdfast.runtime.errors import GrammarUnavailable as EngineRefusal
from holdfast.runtime.grammar.limits import excess
from holdfast.runtime.verbs import Finish, Grammar, GrammarKind, Row, TokenLimits, Work
from holdfast.sessions import errors
from holdfast.sessions.conversation.items import Preamble, Tool
from holdfast.sessions.tools.arguments import closed, followed
from holdfast.sessions.tools.grammar import MAX_GRAMMAR_BYTES, json_format
from holdfast.sessions.turn.events import ReplyDone, ReplyStatus
from holdfast.sessions.turn.request import TurnRequest
from holdfast.sessions.turn.turn_grammar import TurnGrammar

from ..session_stage import LANGUAGE, read, run, say, session_on
from ..test_session_recovery import TALE, die_and_return, rest, telling, until

ANY = Grammar(GrammarKind.REGEX, "(.|\\n)*")
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD, LOOK = Tool(name="add", parameters=OBJECT), Tool(name="look")
STRICT = Tool(name="add", parameters=OBJECT, strict=True)


def grammar_of(tools: tuple[Tool, ...] = (), **fields: Any) -> Grammar | None:
    request = TurnRequest.checked(offered=tools, **fields)
    return TurnGrammar(LANGUAGE).grammar(request, tools)


def test_nothing_is_bound_that_was_not_asked_to_be() -> None:
    assert grammar_of() is None and grammar_of((ADD, LOOK)) is None
    assert grammar_of((STRICT,), tool_choice="none") is None


def test_a_format_is_the_grammar_or_calls_instead() -> None:
    schema = json_format(OBJECT, strict=True, param="f")
    assert grammar_of(format=schema) == schema
    assert json.loads(schema.text)["x-guidance"] == {"lenient": False}
    joined = grammar_of((ADD,), format=schema)
    assert joined is not None and joined.kind is GrammarKind.LARK
    assert joined.text.startswith("start: answer | call") and '"add' in joined.text.replace('\\"', '"')
    assert grammar_of((ADD,), format=schema, tool_choice="none") == schema
    assert grammar_of((ADD,), format=ANY) == ANY, "no call is JSON"
    assert not TurnRequest.checked(offered=(ADD,), format=ANY).parse_calls


def test_a_forced_call_names_the_tools_that_may_be_called() -> None:
    both = grammar_of((ADD, LOOK), tool_choice="required")
    one = grammar_of((ADD, LOOK), tool_choice="required", tool="look")
    assert both is not None and one is not None
    assert "between" in both.text and 'add\\"' in both.text and "look" in both.text
    assert "start: call\n" in one.text and 'add\\"' not in one.text and "look" in one.text
    assert "<tool_call>" in one.text and '"<tool_call>"' not in one.text, "the tag is a token of this model's"


def test_a_strict_tool_binds_all_calls() -> None:
    strict = grammar_of((STRICT, LOOK))
    assert strict is not None and "WORDS" in strict.text and "look" in strict.text
    assert '"lenient": false' in strict.text and '"lenient": true' in strict.text


def test_only_allowed_tools_may_be_called() -> None:
    some = grammar_of((ADD, LOOK), allowed=["look"])
    assert some is not None and "WORDS" in some.text and "look" in some.text and 'add\\"' not in some.text
    every = grammar_of((ADD, LOOK), allowed=["look", "add"])
    assert every is not None and "look" in every.text and 'add\\"' in every.text
    assert grammar_of((ADD, LOOK)) is None
    forced = grammar_of((ADD, LOOK, STRICT), tool_choice="required", allowed=["look"])
    assert forced is not None and 'add\\"' not in forced.text and "between call){0,15}" in forced.text
    joined = grammar_of((ADD, LOOK), format=json_format(OBJECT, strict=True, param="f"), allowed=["look"])
    assert joined is not None and "look" in joined.text and 'add\\"' not in joined.text
    broken = Tool(name="broken", parameters={"type": "array"})
    assert grammar_of((ADD, broken), tool_choice="required", allowed=["add"]) is not None


def test_objects_are_closed_where_they_say_nothing() -> None:
    inner = {"type": "object", "properties": {"x": OBJECT, "y": {"items": OBJECT}, "properties": {}}}
    shut = closed(inner)
    assert shut["additionalProperties"] is False
    assert shut["properties"]["x"]["additionalProperties"] is False
    assert shut["properties"]["y"]["items"]["additionalProperties"] is False
    assert "additionalProperties" not in inner, "the tool is shown to the model as it was"
    for own in ({"additionalProperties": True}, {"allOf": []}, {"anyOf": []}, {"patternProperties": {}}):
        assert closed({**OBJECT, **own}) == {**OBJECT, **own}


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"tool_choice": "required"}, errors.SamplingInvalid, "tool_choice"),
        ({"tool_choice": "required", "tool": "who", "offered": [ADD]}, errors.SamplingInvalid, "tool_choice"),
        ({"tool_choice": "required", "tools": [], "offered": [ADD]}, errors.SamplingInvalid, "tool_choice"),
        ({"tool_choice": "sometimes"}, errors.SamplingInvalid, "tool_choice"),
        ({"allowed": ["who", "add"], "offered": [ADD]}, errors.SamplingInvalid, "tool_choice"),
        ({"allowed": ["add"], "tools": [], "offered": [ADD]}, errors.SamplingInvalid, "tool_choice"),
        ({"tool_choice": "required", "offered": [ADD], "format": ANY}, errors.GrammarInvalid, "tool_choice"),
        (
            {"offered": [Tool(name="a", parameters={"type": "array"}, strict=True)]},
            errors.GrammarInvalid,
            "tools[0].parameters",
        ),
        (
            {"offered": [ADD, Tool(name="a", parameters={"enum": [*range(9999)]}, strict=True)]},
            errors.GrammarInvalid,
            "tools[1].parameters",
        ),
    ],
)
def test_what_cannot_go_together_is_refused(fields: dict[str, Any], kind: type, param: str) -> None:
    with pytest.raises(kind) as refused:
        TurnRequest.checked(**fields)
    assert refused.value.param == param


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (deep(64), "64 levels"),
        (deep(20_000), "64 levels"),
        ({"properties": {str(at): {} for at in range(1001)}}, "1000 properties"),
        ({"anyOf": [{"enum": [*range(3000)]}, {"enum": [*range(3000)]}]}, "5000 values"),
        ({"multipleOf": 5003}, "5000"),
        ({"items": {"multipleOf": 0.97}, "contains": {"multipleOf": 89.0}}, "5000"),
    ],
)
def test_schemas_that_would_take_long_are_refused_before(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(errors.GrammarInvalid, match=why) as refused:
        followed(schema, strict=True, param="here")
    assert refused.value.param == "here"
    text = json.dumps(followed(schema, strict=False, param="here"))
    assert not excess(json.loads(text)), "what takes long is left out"


def test_schemas_within_bounds_are_taken() -> None:
    for schema in (
        deep(63),
        {"enum": [*range(5000)], "multipleOf": 0.0001, "properties": True},
        {"properties": {"enum": {"multipleOf": 2}, "multipleOf": {"enum": ["a"]}}},
    ):
        assert followed(schema, strict=True, param="here") == schema
    with pytest.raises(errors.GrammarInvalid, match="bytes"):
        json_format({"const": "ß" * (MAX_GRAMMAR_BYTES // 2)}, strict=True, param="here")
    with pytest.raises(errors.GrammarInvalid, match="surrogate"):
        json_format({"const": "\ud800"}, strict=True, param="here")


UNIQUE: dict[str, Any] = {"type": "object", "properties": {"ids": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (UNIQUE, "`uniqueItems` in `properties.ids` cannot be enforced"),
        ({"type": "object", "not": {"required": ["a"]}}, "`not` cannot be enforced"),
        ({"properties": {"a": {"anyOf": [{}, {"pattern": "^(?!a)"}]}}}, "`pattern` in `properties.a.anyOf"),
        ({"properties": {"a": {"type": "float"}}}, "`type` in `properties.a`"),
        ({"properties": {"a": {"const": 2**60}}}, "`const` in `properties.a`"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {}}, r"`\$ref` in `properties.a`"),
    ],
)
@pytest.mark.parametrize(
    "choice", [{}, {"tool_choice": "required"}, {"tool_choice": "required", "tool": "a"}]
)
def test_a_strict_tool_that_cannot_be_enforced_is_refused_with_its_keyword(
    schema: dict[str, Any], told: str, choice: dict[str, Any]
) -> None:
    tools = (ADD, LOOK, Tool(name="a", parameters=schema, strict=True))
    with pytest.raises(errors.GrammarInvalid, match=told) as refused:
        TurnRequest.checked(offered=tools, **choice)
    assert refused.value.param == "tools[2].parameters"
    with pytest.raises(errors.GrammarInvalid, match=told) as refused:
        json_format(schema, strict=True, param="here")
    assert refused.value.param == "here"
    for free in ({"tool_choice": "required", "tool": "add"}, {"allowed": ["look"]}, {"tool_choice": "none"}):
        TurnRequest.checked(offered=tools, **free)  # it is not called


def test_a_token_that_begins_a_call_is_a_bad_word_where_none_may_be_made() -> None:
    opening = LANGUAGE.tokenizer.backend.token_to_id("<tool_call>")
    turns = TurnGrammar(LANGUAGE)

    def bad_words(tools: tuple[Tool, ...], **fields: Any) -> tuple[tuple[int, ...], ...]:
        sampling = turns.prepare(TurnRequest.checked(offered=tools, **fields), tools).sampling
        assert sampling.grammar is fields.get("format")
        return sampling.bad_words

    assert bad_words((ADD,), tool_choice="none") == ((opening,),)
    assert bad_words((ADD,), tool_choice="none", bad_words=[[7, 8]]) == ((7, 8), (opening,))
    assert bad_words((ADD,)) == bad_words((), tool_choice="none") == ()
    assert bad_words((ADD,), tool_choice="none", format=ANY) == (), "its grammar rules the token out"


@run
async def test_every_engine_is_given_the_grammar_and_what_was_said() -> None:
    link = telling()
    session = session_on(link)
    say(session, "Tell me.")
    given: list[tuple[Grammar | None, int]] = []
    begin = link.begin

    async def watched(opening: Any, sampling: Any, limits: Any, said: int, tokens: list[int]) -> Any:
        given.append((sampling.grammar, said))
        return await begin(opening, sampling, limits, said, tokens)

    link.begin = watched  # type: ignore[method-assign]
    response = session.respond(TurnRequest.checked(format=ANY))
    events = await until(response, 5, link)
    back = asyncio.create_task(die_and_return(link))
    text, _ = await rest(response, events)
    await back
    assert text == TALE and [grammar for grammar, _ in given] == [ANY, ANY]
    assert given[0][1] == 0 < given[1][1]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("grammar_invalid", errors.GrammarRefused),
        ("grammar_stuck", errors.GrammarStuck),
        ("", errors.TurnFailed),
    ],
)
@run
async def test_a_turn_fails_by_name_and_its_sequence_stays(code: str, kind: type) -> None:
    link = telling()
    session = session_on(link)
    say(session, "Tell me.")

    def failing(seq: int) -> None:
        held = link.held[seq]
        assert held.generation is not None
        row = Row(seq, held.epoch, [], len(held.tokens), Finish.ERROR, Work(0, 0, 0, 0), "no", code=code)
        held.generation.put(row)
        held.generation = None

    step, link.step = link.step, failing  # type: ignore[method-assign]
    _, done = await read(session, TurnRequest.checked(format=ANY))
    assert done.status is ReplyStatus.FAILED and type(done.error) is kind
    assert bool(link.held) is (kind is not errors.TurnFailed), "only what is in doubt is given up"
    link.step = step  # type: ignore[method-assign]
    assert (await read(session))[1].status is ReplyStatus.COMPLETED


@run
async def test_an_engine_without_grammars_says_what_to_install() -> None:
    link = telling()
    session = session_on(link)
    say(session, "Tell me.")

    async def refusing(*_: Any) -> Any:
        raise EngineRefusal("pip install '.[engine]'")

    begin, link.begin = link.begin, refusing  # type: ignore[method-assign]
    _, done = await read(session, TurnRequest.checked(format=ANY))
    assert isinstance(done, ReplyDone) and type(done.error) is errors.GrammarUnavailable
    link.begin = begin  # type: ignore[method-assign]
    assert (await read(session))[1].status is ReplyStatus.COMPLETED


@run
async def test_tools_of_the_turn_are_those_of_where_it_stands() -> None:
    link, grammars = telling(), list[Grammar | None]()
    begin = link.begin

    async def watched(opening: Any, sampling: Any, *more: Any) -> Any:
        grammars.append(sampling.grammar)
        return await begin(opening, sampling, *more)

    link.begin = watched  # type: ignore[method-assign]
    session = session_on(link, Preamble(tools=(LOOK,)))
    say(session, "Tell me.")
    await read(session, TurnRequest.checked(tools=[ADD], tool_choice="required"))
    (grammar,) = grammars
    assert grammar is not None and 'add\\"' in grammar.text and "look" not in grammar.text


def test_a_turn_is_bound_as_it_asks_whatever_bound_the_one_before() -> None:
    grammars = TurnGrammar(LANGUAGE)

    def bound(tools: tuple[Tool, ...], **fields: Any) -> Grammar | None:
        return grammars.prepare(TurnRequest.checked(offered=tools, **fields), tools).sampling.grammar

    one, same, other = (
        Tool(name="add", parameters={"type": "object", "properties": {"a": {"const": const}}})
        for const in (1, 1, True)
    )
    assert one == other, "though they are written otherwise"
    for tools in ((one,), (same,), (other,), (one, LOOK)):
        for fields in ({"tool_choice": "required"}, {}, {"tool_choice": "required", "tool": "add"}):
            assert bound(tools, **fields) == bound(tools, **fields) == grammar_of(tools, **fields)
    assert bound((one,), format=ANY) == ANY and bound((one,)) is None


@pytest.mark.parametrize(
    ("fields", "whole", "gathered"),
    [
        ({"tool_choice": "required", "tool": "add"}, True, True),
        ({"tool_choice": "required", "tool": "add"}, False, False),
        ({"tool_choice": "required"}, True, False),
        ({"tool_choice": "required", "tool": "add", "stop": ["}"]}, True, False),
        ({"tool_choice": "required", "tool": "add", "stop_token_ids": [5]}, True, False),
        ({}, True, False),
    ],
)
def test_only_a_call_that_is_told_whole_comes_up_whole(
    fields: dict[str, Any], whole: bool, gathered: bool
) -> None:
    link = telling("ab")
    session = session_on(link, Preamble(tools=(ADD,)))
    say(session, "Add.")
    request = TurnRequest.checked(offered=(ADD,), **fields)

    async def play() -> None:
        async for _ in session.respond(request, whole_calls=whole):
            pass

    asyncio.run(play())
    limits = [part for verb in link.log for part in verb if isinstance(part, TokenLimits)]
    assert len(limits) == 1 and (limits[0].gather > 1) is gathered
