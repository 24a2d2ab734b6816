"""A program: what the rehearsal compiles for a GPU that is not there, and what random steps still do.

Launches are the real ones, on tensors in this machine's memory, so that pointers are aligned or not as they
would be; nothing is computed. Prints two lists of kernels as JSON. ``--arch``: the GPU's, 90 by default.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
import triton

from holdfast.benchmarks.toys import make_toy
from holdfast.kernels.gpu import configurations, parts, quantised
from holdfast.kernels.gpu.ahead import compiling_for
from holdfast.kvstore.arena import DeviceArena
from holdfast.runtime.execution.runner import TorchRunner
from holdfast.runtime.execution.warmup import rehearse
from holdfast.runtime.grammar.llguidance import ANY_TOKEN
from holdfast.runtime.model.load import load_model
from holdfast.runtime.plan import BlockCopy, PlanRow, RowAsks, plan_of
from holdfast.runtime.verbs import Sampling

BLOCK, BLOCKS, CONTEXT = 16, 40, 65_536


def random_row(random: np.random.Generator) -> PlanRow:
    """A chunk or a single token anywhere in the context, drawn in any way or not at all."""
    count = int(random.choice((1, 1, 1, 2, 7, 33)))
    first = int(random.integers(0, CONTEXT - count)) if random.random() < 0.5 else int(random.integers(0, 30))
    table = random.integers(0, BLOCKS, -(-(first + count) // BLOCK)).astype(np.int32)
    warm = random.random() < 0.7
    sampling = Sampling(
        temperature=float(warm),
        top_k=int(random.choice((0, 0, 1, 7, 50, 64, 65, 200, 300))) if warm else 0,
        top_p=float(random.choice((1.0, 0.5, 0.9))) if warm else 1.0,
        min_p=float(random.choice((0.0, 0.0, 0.1))) if warm else 0.0,
        repetition_penalty=float(random.choice((1.0, 1.0, 1.1))),
        presence_penalty=float(random.choice((0.0, 0.0, 0.5))),
        logit_bias=((3, 1.0),) if random.random() < 0.1 else (),
        bad_words=((3, 4),) if random.random() < 0.1 else (),
        logprobs=int(random.choice((0, 1, 5, 70))) if random.random() < 0.2 else None,
    )
    return PlanRow(
        0,
        0,
        first,
        count,
        np.zeros(count, dtype=np.int64),
        table,
        None if random.random() < 0.1 else sampling,
        past=np.zeros(first + count - 1, dtype=np.int32),
        asks=RowAsks(grammar=ANY_TOKEN if random.random() < 0.1 else None),
    )


def main() -> int:
    """Rehearse, then step; 1 if a step behind the rehearsal compiled anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90, choices=configurations.ARCHITECTURES)
    parser.add_argument("--steps", type=int, default=150)
    asked = parser.parse_args()
    parts.multiprocessors = quantised.multiprocessors = lambda device: 132  # type: ignore[assignment]
    quantised.LEAST_STEPS = 1  # so that the toy's products are split, too
    torch.empty, torch.empty_like = (
        torch.zeros,
        torch.zeros_like,
    )  # nothing is computed: no id may be out of range
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        heads = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        toy = make_toy("tiny", Path(folder), **heads)
        model = load_model(toy, "cpu", "bfloat16", keeping="quantised", quantization="int4")
    kernels = import_module("holdfast.kernels.gpu.backend")
    arena = DeviceArena(model.kv_groups(BLOCK)[0], BLOCKS)
    runner = TorchRunner(model.decoder.computing_by(kernels), arena)
    with compiling_for(asked.arch) as gpu:
        rehearse(runner, BLOCK, CONTEXT, kernels=True)
        ahead = len(gpu.compiled)
        for step in range(asked.steps):
            rows = tuple(random_row(random) for _ in range(random.integers(1, 8)))
            if random.random() < 0.3:
                rows = tuple(row for row in rows if row.count == 1)
            copies = tuple(BlockCopy(0, at + 1) for at in range(random.integers(0, 4)))
            runner.launch(plan_of(step, rows, copies=copies)).tokens()
    names = [one.kernel for one in gpu.compiled]
    print(json.dumps({"triton": triton.__version__, "ahead": names[:ahead], "behind": names[ahead:]}))
    return int(len(names) > ahead)


if __name__ == "__main__":
    raise SystemExit(main())
