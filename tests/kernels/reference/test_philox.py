"""Philox against the known answers of the Random123 library."""

from __future__ import annotations

import pytest
import torch

from holdfast.kernels.reference.philox import philox, uniform

# Random123's kat_vectors: philox4x32 10, counter, key, answer.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN, ids=["zeros", "ones", "pi"])
def test_known_answers(counter, key, answer) -> None:
    words = philox(torch.tensor(counter)[:, None], torch.tensor(key)[:, None])
    assert words[:, 0].tolist() == list(answer)


def test_columns_are_independent() -> None:
    counters = torch.tensor([counter for counter, _, _ in KNOWN]).T
    keys = torch.tensor([key for _, key, _ in KNOWN]).T
    assert philox(counters, keys).T.tolist() == [list(answer) for _, _, answer in KNOWN]


def test_uniform_takes_53_bits_of_the_first_two_words() -> None:
    (value,) = uniform(torch.tensor([0]), torch.tensor([0])).tolist()
    assert value == ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) / 2**53


def test_all_64_bits_of_seed_and_position_count() -> None:
    seeds = torch.tensor([1, 1 + 2**40, -1, 1, 1])
    positions = torch.tensor([5, 5, 5, 6, 5 + 2**40])
    values = uniform(seeds, positions)
    assert len(set(values.tolist())) == 5
    assert ((values >= 0) & (values < 1)).all()
