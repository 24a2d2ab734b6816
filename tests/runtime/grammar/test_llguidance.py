"""Grammars by the library, on a model of random weights: what it says parses and fits, whatever the schema."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from holdfast.benchmarks.toys import make_toy
from holdfast.runtime.build import load_engine
from holdfast.runtime.engine import Engine
from holdfast.runtime.errors import GrammarInvalid
from holdfast.runtime.grammar import llguidance, queue
from holdfast.runtime.grammar.llguidance import Compiler
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.model.folder import find_model
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import (
    Close,
    Finish,
    Generate,
    Grammar,
    GrammarKind,
    Open,
    Refusal,
    Row,
    Sampling,
    TokenLimits,
)
from holdfast.sessions.conversation.items import Tool
from holdfast.sessions.text.tokenizer import ChatTokenizer
from holdfast.sessions.tools.formats import SYNTAXES, Forms
from holdfast.sessions.tools.forms import CallForm
from holdfast.sessions.tools.grammar import CallWriter
from holdfast.sessions.tools.scanner import CallArguments, CallClosed, CallOpened, PlainText
from holdfast.tests.runtime.schemas import ARGUMENTS, SCHEMAS

END = 1529
FEW = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
NOTHING = np.zeros(0, dtype=np.int32)


def test_compiling_keeps_off_the_core_that_the_engines_thread_is_bound_to(bound_beside: set[int]) -> None:
    before = set(threading.enumerate())
    compiler = Compiler(find_model("pocket"), END, (0,))
    compiler.compile(Grammar(GrammarKind.REGEX, "[ab]+"), (), NOTHING).result(60)
    workers = set(threading.enumerate()) - before
    assert workers and all(os.sched_getaffinity(one.native_id or 0) == bound_beside for one in workers)


def test_a_tokenizer_may_have_more_tokens_than_the_model() -> None:
    size = Tokenizer.from_file(str(find_model("pocket") / "tokenizer.json")).get_vocab_size() - 7
    compiler = Compiler(find_model("pocket"), size, (0,))
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, "[ab]+"), (), NOTHING).result(60)
    mask = np.zeros(-(-size // 64), dtype=np.int64)
    matcher.fill(mask)
    assert mask.any()


class Talker:
    """An engine, driven by hand."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.text = Tokenizer.from_file(str(find_model("pocket") / "tokenizer.json"))
        self.next = 0

    def say(self, *asked: tuple[Sampling, TokenLimits]) -> list[tuple[list[int], Row]]:
        """Replies to one prompt, all at once: their tokens and last rows."""
        said: dict[int, list[int]] = {}
        ends: dict[int, Row] = {}
        for sampling, limits in asked:
            self.next += 1
            said[self.next] = []
            self.engine.apply(Open(0, self.next, b"", [1528, 5, 6, 7]))
            answer = self.engine.apply(Generate(0, self.next, sampling, limits))
            assert not isinstance(answer, Refusal), answer
        while len(ends) < len(asked):
            step = self.engine.step()
            if step is None:
                time.sleep(0.0002)
            for row in step.rows if step else ():
                said[row.seq] += row.tokens
                if row.finish is not None:
                    ends[row.seq] = row
        for seq in said:
            self.engine.apply(Close(0, seq))
        return [(said[seq], ends[seq]) for seq in said]

    def follow(self, grammar: Grammar, most: int = 400, **sampling: Any) -> tuple[str, Row]:
        """One reply's text."""
        ((said, end),) = self.say((Sampling(grammar=grammar, **sampling), TokenLimits(most, (END,))))
        words = said[:-1] if said[-1:] == [END] else said
        return self.text.decode(words, skip_special_tokens=False), end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_toy("tiny", tmp_path_factory.mktemp("tiny"), vocab_size=1536)
    shutil.copy(find_model("pocket") / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def talker(folder: Path) -> Iterator[Talker]:
    asked = EngineSettings(model=str(folder), dtype="float32", blocks=256, max_context=1024, host_bytes=0)
    loaded = load_engine(asked, lambda fraction, detail: None, Liveness())
    yield Talker(loaded.engine)  # type: ignore[arg-type]
    loaded.leave()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that others use may take long over a good grammar; what is refused in time says so itself."""
    monkeypatch.setattr(queue, "COMPILE_SECONDS", 30.0)


def json_of(schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON, json.dumps(schema))


def check_schema(talker: Talker, schema: dict[str, Any], seed: int) -> None:
    text, end = talker.follow(json_of(schema), temperature=1.0, seed=seed)
    assert end.finish is Finish.STOP, (schema, text, end.error)
    jsonschema.validate(json.loads(text), schema)


def check_arguments(
    talker: Talker, schema: dict[str, Any], seed: int, form: CallForm = CallForm.HERMES
) -> None:
    """As a session forces them: in the call's own syntax, read by the parser of calls."""
    writer = CallWriter(SYNTAXES[form], ChatTokenizer(talker.text, ""))
    tools = [Tool(name="act", parameters=schema, strict=True)]
    text, end = talker.follow(writer.forced(tools, one=True), temperature=1.0, seed=seed)
    assert end.finish is Finish.STOP, (schema, text, end.error)
    parser = Forms(form).call_parser(tools)
    pieces = [*parser.feed(text), *parser.finish(cut=False)]
    assert pieces[0] == CallOpened("act") and pieces[-1] == CallClosed(complete=True)
    assert not any(isinstance(piece, PlainText) for piece in pieces)
    arguments = "".join(piece.delta for piece in pieces if isinstance(piece, CallArguments))
    jsonschema.validate(json.loads(arguments), schema)


EVERY_KIND = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "part": {"type": "number", "minimum": 0, "maximum": 1},
        "kind": {"type": "string", "enum": ["big", "small"]},
        "sure": {"type": "boolean"},
        "none": {"type": "null"},
        "places": {"type": "array", "items": {"enum": ["here", {"at": 1}]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["count", "kind", "places"],
}


@pytest.mark.parametrize("form", SYNTAXES)
def test_what_a_form_forces_its_parser_reads(talker: Talker, form: CallForm) -> None:
    for seed in range(4):
        check_arguments(talker, EVERY_KIND, seed, form)


@settings(FEW, max_examples=15)
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_a_reply_begun_again_at_any_token_has_the_same_words_follow(
    talker: Talker, folder: Path, schema: dict[str, Any], seed: int
) -> None:
    """What is forced depends on what was said alone, wherever an engine died."""
    sampling = Sampling(grammar=json_of(schema), temperature=1.0, seed=seed)
    ((said, _),) = talker.say((sampling, TokenLimits(400, (END,))))
    words = said[:-1] if said[-1:] == [END] else said
    compiler = Compiler(folder, 1536, (END,))
    for cut in range(len(words) + 1):
        again = compiler.compile(json_of(schema), (END,), np.array(words[:cut], dtype=np.int32)).result()
        forced = again.go_on(400)
        assert forced == words[cut : cut + len(forced)] and not again.go_on(400)


def test_a_schema_with_little_to_choose_is_mostly_said_without_a_draw(talker: Talker) -> None:
    schema = {
        "type": "object",
        "properties": {"measurement": {"const": "temperature"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["measurement", "unit"],
        "additionalProperties": False,
    }
    before = talker.engine.statistics()
    text, _ = talker.follow(json_of(schema))
    now = talker.engine.statistics()
    assert json.loads(text)["unit"] in ("celsius", "fahrenheit")
    assert now["forced"] - before["forced"] > 2 * (now["sampled"] - before["sampled"])


@settings(FEW, max_examples=40)
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_any_schema_is_followed(talker: Talker, schema: dict[str, Any], seed: int) -> None:
    check_schema(talker, schema, seed)


@settings(FEW, max_examples=20)
@given(schema=ARGUMENTS, seed=st.integers(0, 99))
def test_any_arguments_fit_their_schema(talker: Talker, schema: dict[str, Any], seed: int) -> None:
    check_arguments(talker, schema, seed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@settings(FEW, max_examples=1000)
@given(schema=ARGUMENTS, seed=st.integers(0, 10_000))
def test_a_thousand_schemas_are_followed(talker: Talker, schema: dict[str, Any], seed: int) -> None:
    check_arguments(talker, schema, seed)


WALK = json_of(
    {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0},
                             "minItems": 4, "maxItems": 4}, "b": {"enum": ["north", "south"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)  # fmt: skip


def test_a_reply_begun_again_anywhere_goes_on_with_the_same_tokens(talker: Talker) -> None:
    sampling, limits = Sampling(temperature=1.0, seed=5, grammar=WALK), TokenLimits(200, (END,))
    ((whole, _),) = talker.say((sampling, limits))
    for cut in range(1, len(whole)):
        talker.next += 1
        talker.engine.apply(Open(0, talker.next, b"", [1528, 5, 6, 7, *whole[:cut]]))
        talker.engine.apply(Generate(0, talker.next, sampling, limits, cut))
        rest: list[int] = []
        while len(rest) < len(whole) - cut:
            step = talker.engine.step()
            rest += [token for row in step.rows for token in row.tokens] if step else []
        assert rest == whole[cut:]
        talker.engine.apply(Close(0, talker.next))


def test_what_was_said_must_follow_it(talker: Talker) -> None:
    talker.next += 1
    talker.engine.apply(Open(0, talker.next, b"", [1528, 5, 6, 7]))
    talker.engine.apply(Generate(0, talker.next, Sampling(grammar=WALK), TokenLimits(20, (END,)), 3))
    rows: list[Row] = []
    while not rows:
        step = talker.engine.step()
        rows += step.rows if step else []
    assert rows[0].code == "grammar_invalid" and "what was said" in (rows[0].error or "")


def test_company_changes_nothing_and_log_probabilities_are_the_models(talker: Talker) -> None:
    bound = Sampling(temperature=1.0, seed=3, grammar=WALK, logprobs=0)
    free = Sampling(temperature=1.0, seed=3, logprobs=2)
    ((alone, _),) = talker.say((bound, TokenLimits(99, (END,))))
    together = talker.say(
        (bound, TokenLimits(99, (END,))),
        (free, TokenLimits(30, (END,))),
        (bound, TokenLimits(99, (END,))),
    )
    assert together[0][0] == together[2][0] == alone
    sampling = Sampling(grammar=Grammar(GrammarKind.CHOICE, '["7"]'), logprobs=1)
    ((_, end),) = talker.say((sampling, TokenLimits(9, (END,))))
    assert end.logprobs is not None and end.logprobs[0].logprob < end.logprobs[0].top[0][1] < 0


def test_overlapped_steps_say_the_same(talker: Talker, folder: Path) -> None:
    bound = Sampling(temperature=1.0, seed=3, grammar=WALK), TokenLimits(99, (END,))
    free = Sampling(temperature=1.0, seed=3), TokenLimits(30, (END,))
    asked = EngineSettings(
        model=str(folder), dtype="float32", blocks=64, max_context=256, host_bytes=0, depth=2
    )
    loaded = load_engine(asked, lambda fraction, detail: None, Liveness())
    overlapped = Talker(loaded.engine)  # type: ignore[arg-type]
    said = [tokens for tokens, _ in overlapped.say(bound, free, bound)]
    assert said == [tokens for tokens, _ in talker.say(bound, free, bound)]
    loaded.leave()


@pytest.mark.parametrize(
    ("kind", "text", "form"),
    [
        (GrammarKind.REGEX, "[0-9]{3}-(ab|ba)+c", "[0-9]{3}-(ab|ba)+c"),
        (
            GrammarKind.CHOICE,
            '["up", "upward", "down/\\"there\\"", "straße"]',
            '(up|upward|down/"there"|straße)',
        ),
        (GrammarKind.LARK, 'start: "n" digit+ "!"\ndigit: /[0-7]/', "n[0-7]+!"),
    ],
)
def test_other_kinds(talker: Talker, kind: GrammarKind, text: str, form: str) -> None:
    for seed in range(6):
        said, end = talker.follow(Grammar(kind, text), 60, temperature=1.5, seed=seed)
        if end.finish is Finish.STOP:
            assert re.fullmatch(form, said), said
        else:
            assert end.finish is Finish.LENGTH and len(said) >= 60, "it may go on"
    assert end.error is None


def test_with_limits_words_and_biases(talker: Talker) -> None:
    many = Grammar(GrammarKind.REGEX, "a*")
    a = talker.text.token_to_id("a")
    ((said, end),) = talker.say((Sampling(grammar=many), TokenLimits(30, (END,), 12)))
    assert len(said) >= 12 and (end.finish is Finish.STOP or len(said) == 30), (
        "no end before the least number"
    )
    ((said, end),) = talker.say((Sampling(grammar=many), TokenLimits(30, (END, a), 0)))
    assert said in ([a], [END]) or a not in said[:-1], (
        "a stop id that is text ends it where the grammar has it"
    )
    ((said, end),) = talker.say(
        (Sampling(grammar=many, logit_bias=((END, 1000.0),)), TokenLimits(30, (END,), 0)),
    )
    assert said == [END] and end.finish is Finish.STOP, "a bias chooses among what is allowed"
    one = Sampling(grammar=Grammar(GrammarKind.CHOICE, '["a"]'), bad_words=((a,),))
    ((said, end),) = talker.say((one, TokenLimits(30, (END,))))
    assert not said and end.code == "grammar_stuck"
    ((said, end),) = talker.say((Sampling(grammar=many), TokenLimits(5, ())))
    assert end.finish is Finish.LENGTH and END not in said, "an end token that ends nothing is not said"


BOMBS = [
    json_of({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(3000)}}),
    json_of({"enum": [f"value number {n}" for n in range(100_000)]}),
    Grammar(GrammarKind.JSON, '{"a":' * 5000 + "1" + "}" * 5000),
    Grammar(GrammarKind.REGEX, "(a?){5000}a{5000}"),
    Grammar(GrammarKind.REGEX, "((((a{0,900}){0,900}){0,900}){0,900}b"),
    Grammar(GrammarKind.LARK, "start: nowhere"),
    Grammar(GrammarKind.CHOICE, "[]"),
    Grammar(GrammarKind.CHOICE, "{"),
]


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_a_bomb_ends_its_own_turn_and_no_other(
    talker: Talker, bomb: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "COMPILE_SECONDS", 0.5)
    calm, hurt = talker.say((Sampling(), TokenLimits(40)), (Sampling(grammar=bomb), TokenLimits(400, (END,))))
    assert hurt[1].finish is Finish.ERROR and hurt[1].code == "grammar_invalid", hurt[1]
    assert len(calm[0]) == 40 and calm[0] == talker.say((Sampling(), TokenLimits(40)))[0][0]


def test_an_engine_without_the_library_starts_and_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance, "available", lambda: False)
    asked = EngineSettings(model=str(folder), dtype="float32", blocks=64, max_context=256, host_bytes=0)
    engine = load_engine(asked, lambda fraction, detail: None, Liveness()).engine
    engine.apply(Open(0, 1, b"", [1528, 5]))
    refused = engine.apply(Generate(0, 1, Sampling(grammar=WALK), TokenLimits(9)))
    assert isinstance(refused, Refusal) and refused.code == "grammar_unavailable"
    assert "pip install '.[engine]'" in refused.message
    assert not isinstance(engine.apply(Generate(0, 1, Sampling(), TokenLimits(1))), Refusal)


def test_compiled_grammars_are_kept_up_to_a_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "KEPT", 3)
    compiler = Compiler(folder, 1536, (END,))
    for number in (1, 2, 3, 1, 4, 1, 2):
        compiler.compile(Grammar(GrammarKind.REGEX, f"a{{{number}}}"), (END,), NOTHING).result()
    told = compiler.statistics()
    assert (told["grammars_kept"], told["grammars_compiled"], told["grammars_found"]) == (3, 5, 2)
    monkeypatch.setattr(llguidance, "KEPT_BYTES", 100)
    compiler.compile(Grammar(GrammarKind.REGEX, "a" * 99), (END,), NOTHING).result()
    assert compiler.statistics()["grammars_kept"] == 1


def test_a_tokenizer_that_is_not_there_is_told(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path, 1536, (END,))
    with pytest.raises(GrammarInvalid, match=r"tokenizer\.json"):
        compiler.compile(WALK, (END,), NOTHING).result()
