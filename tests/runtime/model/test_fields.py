"""JSON fields: each error names file, field and cause in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.runtime.errors import ConfigInvalid
from holdfast.runtime.model.fields import Fields, read_json


def fields(**values) -> Fields:
    return Fields(Path("a.json"), values, {"left_out": 7}, "deep.")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"3", b"null"])
def test_a_file_that_is_no_object(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigInvalid, match=r"a\.json: ") as caught:
        read_json(tmp_path / "a.json")
    assert "\n" not in caught.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"a\.json: missing"):
        read_json(tmp_path / "a.json")
    with pytest.raises(ConfigInvalid, match="directory"):
        read_json(tmp_path)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "3", 2**31, [1], float("nan")])
def test_integers_are_bounded(value: object) -> None:
    with pytest.raises(ConfigInvalid, match=r"^a\.json: deep\.size: a whole number from 1 to 2147483647"):
        fields(size=value).integer("size")


@pytest.mark.parametrize("value", [0, -1.5, float("inf"), float("nan"), False, "1", {}, 10**400])
def test_numbers_are_finite_and_positive(value: object) -> None:
    with pytest.raises(ConfigInvalid, match=r"^a\.json: deep\.size: a finite number above 0"):
        fields(size=value).number("size")


def test_flags_and_texts_are_what_they_say() -> None:
    with pytest.raises(ConfigInvalid, match="true or false"):
        fields(on=1).flag("on")
    with pytest.raises(ConfigInvalid, match="a string"):
        fields(name=1).text("name")
    with pytest.raises(ConfigInvalid, match="an object"):
        fields(name=1).object("name")


def test_absent_and_null_take_the_default_or_are_missing() -> None:
    assert fields().integer("left_out") == fields(left_out=None).integer("left_out") == 7
    with pytest.raises(ConfigInvalid, match=r"deep\.size: missing"):
        fields(size=None).integer("size")


def test_an_optional_field_may_be_null_but_not_wrong() -> None:
    assert fields().optional_integer("left_out") == fields().optional_number("left_out") == 7
    assert fields(left_out=None).optional_integer("left_out") is None
    assert fields(left_out=None).optional_number("left_out") is None
    assert fields().optional_number("nowhere") is None
    assert (fields(size=3).optional_integer("size"), fields(size=3).optional_number("size")) == (3, 3.0)
    for wrong in (0, "3", False, [3]):
        with pytest.raises(ConfigInvalid, match=r"deep\.size: "):
            fields(size=wrong).optional_integer("size")
        with pytest.raises(ConfigInvalid, match=r"deep\.size: "):
            fields(size=wrong).optional_number("size")


@pytest.mark.parametrize("value", [[1.0], [1, 2, 3], [1, 0], [1, "2"], [1, True], 2, [1, 10**400], None])
def test_lists_of_numbers_have_their_length(value: object) -> None:
    assert fields(size=[1, 0.5]).numbers("size", 2) == (1.0, 0.5)
    with pytest.raises(ConfigInvalid, match=r"^a\.json: deep\.size: (a list of 2 finite numbers|missing)"):
        fields(size=value).numbers("size", 2)


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigInvalid) as caught:
        fields(size="x" * 10_000).integer("size")
    assert len(caught.value.message) < 200
