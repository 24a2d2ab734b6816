"""The storm of steps, cut short: nothing differs, and what would differ is counted with its seed."""

from __future__ import annotations

import json

import pytest

from holdfast.benchmarks import steps


@pytest.mark.parametrize("name", list(steps.COURSES))
def test_a_storm_passes(name: str) -> None:
    passed = steps.run(steps.COURSES[name], 1500, seed=3)
    assert not passed.mismatch, passed.mismatch
    assert passed.steps >= 1500 and passed.turns > 50 and passed.preempted > 0
    assert passed.moves > 500 or steps.COURSES[name].slots is None


def test_bytes_changed_under_way_are_a_mismatch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from holdfast.tests.runtime.fakes import FakeRunner

    load = FakeRunner._load

    def spoilt(self: FakeRunner, move: object) -> None:
        load(self, move)  # type: ignore[arg-type]
        self._digests[move.block, 0] ^= 1  # type: ignore[attr-defined]

    monkeypatch.setattr(FakeRunner, "_load", spoilt)
    assert steps.main(["--only", "host-1", "--steps", "500", "--seed", "9"]) == 1
    table, _, told = capsys.readouterr().out.partition("{")
    assert "host, lock step" in table
    assert json.loads("{" + told)["courses"][0]["mismatch"].startswith("seed 9: AssertionError")
