"""Options: what is written for a field becomes its value, and a value that is not allowed is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest

from holdfast.kvstore.options import Option, expanded, invalid, make, settings_of


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Some:
    """A field of each kind."""

    room_bytes: Annotated[int | None, Option(least=1)] = None
    """Room for
    all of it."""
    pair: Annotated[tuple[float, float], Option(form="two numbers")] = (1.0, 0.5)
    names: Annotated[tuple[str, ...], Option()] = ()
    colour: Annotated[Colour | None, Option(words={"auto": None})] = None
    most: Annotated[int | None, Option(name="at_most", least=0, most=9, words={0: None})] = 4
    kind: Annotated[str, Option(choices=("auto", "float16"), words={"half": "float16"})] = "auto"
    after: Annotated[int, Option(name="ends", words={True: 512, False: 0})] = 512
    key: Annotated[str | None, Option()] = field(default=None, repr=False)
    inner: int = 3


DEFAULTS = {one.name: one.written_default for one in settings_of(Some)}


def test_what_is_written_by_default_makes_the_defaults() -> None:
    assert DEFAULTS == {
        "room_bytes": None,
        "pair": "1,0.5",
        "names": None,
        "colour": "auto",
        "at_most": 4,
        "kind": "auto",
        "ends": True,
        "key": None,
    }
    assert make(Some, DEFAULTS) == Some() and make(Some, DEFAULTS, inner=7) == Some(inner=7)


@pytest.mark.parametrize(
    ("name", "written", "made"),
    [
        ("room_bytes", "2KiB", Some(room_bytes=2048)),
        ("pair", "2, 4", Some(pair=(2.0, 4.0))),
        ("names", ["a", "b"], Some(names=("a", "b"))),
        ("colour", "red", Some(colour=Colour.RED)),
        ("at_most", 0, Some(most=None)),
        ("kind", "half", Some(kind="float16")),
        ("ends", False, Some(after=0)),
        ("key", "k", Some(key="k")),
    ],
)
def test_what_is_written_becomes_the_fields_value(name: str, written: object, made: Some) -> None:
    assert make(Some, {**DEFAULTS, name: written}) == made


@pytest.mark.parametrize(
    ("name", "written", "told"),
    [
        ("room_bytes", "lots", "--room-bytes 'lots' is not a size such as 512MiB or 8GiB"),
        ("pair", "1", "--pair: '1' is not two numbers"),
        ("pair", "1,2,3", "--pair: '1,2,3' is not two numbers"),
        ("pair", "1,x", "--pair: '1,x' is not two numbers"),
    ],
)
def test_what_cannot_be_read_is_told_with_the_options_name(name: str, written: str, told: str) -> None:
    with pytest.raises(ValueError) as raised:
        make(Some, {**DEFAULTS, name: written})
    assert str(raised.value) == told


def test_values_that_are_not_allowed_are_told() -> None:
    assert invalid(Some()) == invalid(Some(most=None)) == ""
    assert invalid(Some(room_bytes=0)) == "room_bytes is 0, less than 1"
    assert invalid(Some(most=10)) == "at_most is 10, more than 9"
    assert invalid(Some(kind="int7")) == "kind is 'int7', not one of auto, float16"


def test_a_field_that_is_not_shown_is_a_secret() -> None:
    assert [one.name for one in settings_of(Some) if one.secret] == ["key"]


def test_the_text_below_a_field_is_its_help() -> None:
    assert [one.help for one in settings_of(Some) if one.help] == ["Room for all of it."]


def test_a_home_folder_is_found_and_an_unknown_user_s_stays_as_it_is_written() -> None:
    assert expanded("~/a") == Path.home() / "a"
    assert expanded("~no-such-user/a") == Path("~no-such-user/a")
