"""The sampling and limits that the engine refuses, and the makers' defaults that it reads."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from holdfast.runtime.errors import ConfigInvalid, SamplingInvalid
from holdfast.runtime.model.config import read_defaults
from holdfast.runtime.scheduler.sampling_limits import check_sampling
from holdfast.runtime.verbs import Sampling, SamplingDefaults, TokenLimits

VOCAB = 10
GOOD = TokenLimits(5)


@pytest.mark.parametrize(
    ("sampling", "limits", "named"),
    [
        (Sampling(min_p=-0.01), GOOD, "min_p"),
        (Sampling(min_p=1.01), GOOD, "min_p"),
        (Sampling(min_p=math.nan), GOOD, "min_p"),
        (Sampling(typical_p=0.0), GOOD, "typical_p"),
        (Sampling(typical_p=1.01), GOOD, "typical_p"),
        (Sampling(repetition_penalty=0.0), GOOD, "repetition_penalty"),
        (Sampling(repetition_penalty=-1.0), GOOD, "repetition_penalty"),
        (Sampling(repetition_penalty=math.inf), GOOD, "repetition_penalty"),
        (Sampling(presence_penalty=math.nan), GOOD, "presence_penalty"),
        (Sampling(frequency_penalty=-math.inf), GOOD, "frequency_penalty"),
        (Sampling(logit_bias=((10, 1.0),)), GOOD, "logit_bias 10"),
        (Sampling(logit_bias=((-1, 1.0),)), GOOD, "logit_bias -1"),
        (Sampling(logit_bias=((1, math.nan),)), GOOD, "logit_bias nan"),
        (Sampling(logit_bias=((1, 1.0), (1, 2.0))), GOOD, "twice"),
        (Sampling(bad_words=((),)), GOOD, "empty"),
        (Sampling(bad_words=((1, 10),)), GOOD, "bad_words 10"),
        (Sampling(logprobs=-1), GOOD, "logprobs"),
        (Sampling(logprobs=21), GOOD, "logprobs"),
        (Sampling(), TokenLimits(5, (10,)), "stop_ids 10"),
        (Sampling(), TokenLimits(5, (-1,)), "stop_ids -1"),
        (Sampling(), TokenLimits(5, (), -1), "min_tokens -1"),
        (Sampling(), TokenLimits(5, (), 6), "min_tokens 6"),
        (Sampling(), TokenLimits(0), "max_tokens 0"),
    ],
)
def test_out_of_bounds_is_refused_by_name(sampling: Sampling, limits: TokenLimits, named: str) -> None:
    with pytest.raises(SamplingInvalid, match=named):
        check_sampling(sampling, limits, VOCAB)


def test_the_bounds_themselves_are_good() -> None:
    check_sampling(
        Sampling(
            min_p=1.0, typical_p=1e-9, repetition_penalty=0.01, presence_penalty=-1000.0,
            frequency_penalty=1000.0, logit_bias=((0, -100.0), (9, 100.0)),
            bad_words=((9,), (0, 9)), logprobs=20,
        ),
        TokenLimits(5, (0, 9), 5),
        VOCAB,
    )  # fmt: skip


def defaults(folder: Path, **fields: object) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return read_defaults(folder)


def test_defaults_are_read_as_generate_reads_them(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == SamplingDefaults()
    said = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    assert defaults(tmp_path, do_sample=True, **said) == SamplingDefaults(**said)
    assert defaults(tmp_path, do_sample=True) == SamplingDefaults(temperature=1.0)
    assert defaults(tmp_path, do_sample=True, top_k=-1) == SamplingDefaults(temperature=1.0), (
        "all tokens count"
    )
    assert defaults(tmp_path, do_sample=True, top_p=None, temperature=1) == SamplingDefaults(temperature=1.0)
    assert defaults(tmp_path, **said) == SamplingDefaults(repetition_penalty=1.05)
    assert defaults(tmp_path, do_sample=False, **said) == SamplingDefaults(repetition_penalty=1.05)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True),
        ("top_p", 0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.1), ("typical_p", 0), ("top_k", -2),
        ("top_k", 1.5), ("repetition_penalty", 0), ("repetition_penalty", 101), ("do_sample", 1),
    ],
)  # fmt: skip
def test_defaults_out_of_bounds_name_file_and_field(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigInvalid, match=f"generation_config.json: {field}"):
        defaults(tmp_path, **{"do_sample": True, field: value})
