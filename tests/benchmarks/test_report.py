"""What a benchmark prints: goals that are met or not, and one JSON document after the table."""

from __future__ import annotations

import json
import math

import pytest

from holdfast.benchmarks.report import Goal, percentile, show


@pytest.mark.parametrize(
    ("value", "better", "met"),
    [(2.0, "higher", True), (1.0, "higher", False), (2.0, "lower", True), (3.0, "lower", False)],
)
def test_a_goal_is_met_from_its_side(value: float, better: str, met: bool) -> None:
    assert Goal("it", value, "ms", 2.0, better).met is met


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile(range(100), 0.99) == 99
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([7.0], 0.99) == 7.0
    assert math.isnan(percentile([], 0.5))


def test_the_table_stands_before_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        "it",
        7,
        {"seconds": 1.5},
        [Goal("recall", 98.0, "%", 97.0, "higher"), Goal("gap", 3.0, "ms", 2.0, "lower")],
    )
    shown = capsys.readouterr().out
    table, _, document = shown.partition("{")
    assert [line.split()[-1] for line in table.splitlines()] == ["met", "MISSED"]
    told = json.loads("{" + document)
    assert told["seed"] == 7 and told["seconds"] == 1.5 and told["cores"] >= 1 and told["versions"]["torch"]
    assert told["goals"][0] == {
        "name": "recall",
        "value": 98.0,
        "unit": "%",
        "goal": 97.0,
        "better": "higher",
        "met": True,
    }
