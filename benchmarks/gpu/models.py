"""Models of real shapes, with random weights. No weight files are needed: a shape is given by its
``config.json``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from ...kernels.backends import Needs, choose
from ...runtime.model.config import read_config
from ...runtime.model.decoder import Decoder
from ...runtime.model.folder import find_model
from ...runtime.model.load import LoadedModel
from ...runtime.model.weights import allocate, assemble, pieces_of
from .measure import Bench

COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65_536,
    "attention_bias": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
TOY = {
    "hidden_size": 64,
    "head_dim": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1536,
}
"""The fields that a rehearsal puts instead of each shape's own."""


def drawn(bench: Bench, name: str) -> LoadedModel:
    """A model of this shape in bf16, with random weights of a fixed seed, on the Triton kernels; its tokenizer
    is the pocket model's, for grammars."""
    device, dtype = bench.device, torch.float32 if bench.rehearsal else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape_of(bench, name)))
        config = read_config(Path(folder))
    tensors = allocate(pieces_of(config), device, dtype)
    generator = torch.Generator(device).manual_seed(0)
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
    kernels = choose("triton", device, Needs(dtype, [(config.head_dim, 16)])).kernels
    decoder = Decoder(config, assemble(config, tensors), kernels)
    count = sum(tensor.numel() for tensor in tensors.values())
    return LoadedModel("drawn", find_model("pocket"), config, decoder, bytes(32), count)


def shape_of(bench: Bench, name: str) -> dict[str, Any]:
    """The content of the model's ``config.json``."""
    return COMMON | SHAPES[name] | (TOY if bench.rehearsal else {})
