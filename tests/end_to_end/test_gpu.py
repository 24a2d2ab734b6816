"""The engine's smoke test on CUDA: the same tokens as on the CPU. Skipped where there is no device."""

from __future__ import annotations

import pytest
import torch

from holdfast.benchmarks.gpu import engine, serving
from holdfast.benchmarks.gpu.measure import Bench


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_says_what_the_cpu_says() -> None:
    figures = serving.graphs(Bench(torch.device("cuda"), False))
    replies = [figure for figure in figures if figure["unit"] == "replies"]
    assert len(replies) == len(serving.WAYS) and all(figure["met"] for figure in replies)


def test_the_same_path_runs_on_a_cpu() -> None:
    """So that what a GPU will run is run at all: prompts, engine and count, with the CPU instead of the GPU."""
    from holdfast.runtime.model.load import load_model

    model = load_model("pocket", "cpu", "float32")
    said, _ = engine.generate(model, [[30, 31, 32], [40] * 20], 8)
    assert [len(one) for one in said] == [8, 8]
