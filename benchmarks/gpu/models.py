"""Part ``models``: prefill and decode of real models' shapes through the engine, with random weights.

No weight files are needed: a shape is given by its ``config.json``. Decode is compared with the time to read
every weight once at the machine's copy rate, the lower bound of a dense model's step.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ...kernels.backends import Needs, choose
from ...runtime import verbs
from ...runtime.model.config import ModelConfig, read_config
from ...runtime.model.decoder import Decoder
from ...runtime.model.load import LoadedModel
from ...runtime.model.weights import allocate, assemble, pieces_of
from .engine import engine_of, rows_of
from .measure import Bench, Figure, copy_rate, figure

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "rope_theta": 1e6}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3
    | {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN3
    | {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    },
}
COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "attention_bias": False,
}
TOY = {
    "hidden_size": 64,
    "head_dim": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
}
"""The fields that a rehearsal puts in place of each shape's own."""


def models(bench: Bench) -> list[Figure]:
    """Measure every shape in turn; the memory of one is freed before the next."""
    rate, lines = copy_rate(bench), []
    for name, shape in SHAPES.items():
        found = _shape(bench, name, {**COMMON, **shape, **(TOY if bench.rehearsal else {})}, rate)
        bench.tell(found)
        lines += found
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    return lines


def _shape(bench: Bench, name: str, shape: dict[str, Any], rate: float) -> list[Figure]:
    made = drawn(shape, bench.device, torch.float32 if bench.rehearsal else torch.bfloat16)
    length, new = bench.size(4096, 20), bench.size(128, 3)
    prompt = [at % 200 for at in range(length)]
    _run(made, [prompt], 1)  # kernels are compiled and loaded
    first = _run(made, [prompt], 1)
    lines = [figure(f"{name}: prefill of {length} tokens", length / first, "tok/s")]
    reading = made.parameters * made.decoder.dtype.itemsize / rate / 1e6  # seconds
    for rows in (1, 16, 64):
        prompts = [[(7 * row + at) % 200 for at in range(bench.size(64, 3))] for row in range(rows)]
        _run(made, prompts, new)  # those of single tokens, of so many rows
        seconds = _run(made, prompts, new) - _run(made, prompts, 1)
        step = seconds / (new - 1)
        lines.append(figure(f"{name}: decode, {rows} sequences", rows / step, "tok/s"))
        lines.append(
            figure(f"{name}: decode, {rows}: reading the weights ÷ a step", 100 * reading / step, "%")
        )
    return lines


def _run(model: LoadedModel, prompts: list[list[int]], new: int) -> float:
    """The seconds until ``new`` tokens were generated greedily after each prompt, in an engine of their own."""
    blocks = sum(math.ceil((len(prompt) + new + 1) / 16) + 1 for prompt in prompts)
    made = engine_of(model, step_tokens=2048, blocks=max(blocks, 320), context=4400)
    for seq, prompt in enumerate(prompts):
        made.apply(verbs.Open(0, seq, b"", prompt))
        made.apply(verbs.Generate(0, seq, verbs.Sampling(), verbs.TokenLimits(new, min_tokens=new)))
    if model.decoder.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    said = sum(len(row.tokens) for row in rows_of(made))
    seconds = time.perf_counter() - start
    assert said == new * len(prompts), f"{said} tokens instead of {new} for each of {len(prompts)} prompts"
    return seconds


def drawn(shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A model of this ``shape`` (the content of a ``config.json``), with random weights of a fixed seed, on the
    Triton kernels."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = read_config(Path(folder))
    tensors = allocate(pieces_of(config), device, dtype)
    generator = torch.Generator(device).manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
    kernels = choose("triton", device, Needs(dtype, [(config.head_dim, 16)])).kernels
    return _loaded(config, Decoder(config, assemble(config, tensors), kernels), tensors)


def _loaded(config: ModelConfig, decoder: Decoder, tensors: dict[str, torch.Tensor]) -> LoadedModel:
    count = sum(tensor.numel() for tensor in tensors.values())
    return LoadedModel("drawn", Path(), config, decoder, bytes(32), count)
