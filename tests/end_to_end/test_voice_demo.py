"""The call of ``demo --voice``, spoken faster than people do, and the recogniser that hears it."""

from __future__ import annotations

import re
from random import Random

import pytest

from holdfast.benchmarks import voice_demo

SPOKEN = "one two three four five six seven eight nine ten"


def test_a_call_is_the_same_streamed_and_not(capfd: pytest.CaptureFixture[str]) -> None:
    assert voice_demo.run(speed=20, lines=4) == 0
    shown, log = capfd.readouterr()
    assert not log, "the engine's process logs nothing among the lines"
    counts = re.findall(r"TTFT from the end of speech \d+ ms, not streamed \d+ ms", shown)
    assert len(counts) == 4
    assert "cut after 40 characters" in shown and "4821" in shown
    (corrected,) = re.findall(r"was corrected (\d+) times, and \d+ tokens were computed in vain", shown)
    assert int(corrected) > 0
    assert re.search(r"of lines of 12 words or more \d+ ms streamed, \d+ ms not", shown)


def test_partials_come_in_time_and_end_with_what_was_said() -> None:
    heard = list(voice_demo.partials(SPOKEN, Random(0)))
    assert heard[-1] == voice_demo.Partial(10 / voice_demo.WORDS_PER_SECOND, SPOKEN)
    times = [partial.at for partial in heard]
    assert times == sorted(times)
    assert all(len(one.text.split()) <= one.at * voice_demo.WORDS_PER_SECOND + 1e-9 for one in heard[:-1])


def test_one_partial_in_ten_is_wrong_about_its_last_words() -> None:
    chance = Random(1)
    heard = [partial.text for _ in range(200) for partial in voice_demo.partials(SPOKEN, chance)][:-1]
    wrong = [text for text in heard if not SPOKEN.startswith(text)]
    assert 0.05 < len(wrong) / len(heard) < 0.15
    kept = [
        len(text.split()) - sum(a == b for a, b in zip(text.split(), SPOKEN.split(), strict=False))
        for text in wrong
    ]
    assert set(kept) == {1, 2, 3}


def test_other_words_or_a_reply_that_forgets_are_faults() -> None:
    line, right = (
        voice_demo.SpokenLine("What is my name?", "Marisol"),
        voice_demo.VoiceReply("Marisol.", 1.0, 0),
    )
    assert not voice_demo._faults(line, right, right)
    assert len(voice_demo._faults(line, right, voice_demo.VoiceReply("Bella.", 1.0, 0))) == 1
    forgot = voice_demo.VoiceReply("not told", 1.0, 0)
    assert len(voice_demo._faults(line, forgot, forgot)) == 1
