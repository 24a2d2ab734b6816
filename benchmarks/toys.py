"""Toy models: real Hugging Face folders with random weights, for parity tests and benchmarks.

Random weights of the usual scale only repeat the last token, so that all engines would agree; with larger
projections the output varies. Toys take token ids; `teach` gives them a language of one character per token,
for tests through text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 256,
        "initializer_range": 0.1,
    },
    "toy-9m": {
        "num_hidden_layers": 8,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 768,
        "vocab_size": 4096,
    },
    "toy-50m": {
        "num_hidden_layers": 12,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1920,
        "vocab_size": 4096,
    },
}
"""The configuration of each toy, by its name: all have tied embeddings, and no end token, so that a run has the
length that is asked for."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "internlm3": {},
    "smollm3": {"num_hidden_layers": 4},
    "seed_oss": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "ministral": {"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "phi3": {"sliding_window": 40, "partial_rotary_factor": 0.75},
    "gemma": {},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 20, "num_hidden_layers": 4},
    "gemma3_text": {
        "sliding_window": 24,
        "query_pre_attn_scalar": 20,
        "num_hidden_layers": 4,
        "sliding_window_pattern": 3,
        "final_logit_softcapping": 30.0,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 24, "num_hidden_layers": 4},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
}
"""By model type, configuration fields that make the differences of this type visible on a small model."""


USER, ASSISTANT = 0, 1
"""The token that begins a user's message, and the one that begins an assistant's, in the toys' chat
template."""

FIRST_CHARACTER = 0x4E00
"""The code point of token 0's character; that of token n is n further. All are plain letters to every
tokenizer."""


def make_toy(
    name: str,
    folder: Path,
    *,
    family: str = "qwen3",
    seed: int = 0,
    projection_scale: float = 3.0,
    noise: float = 0.0,
    dtype: str = "float32",
    shard_size: str = "5GB",
    **changes: Any,
) -> Path:
    """Write the toy ``name`` to ``folder`` and return the folder; the same seed writes the same weights.

    ``family``: a model type of `FAMILIES`. ``projection_scale`` multiplies every projection matrix; ``noise``
    times a normal number is added to biases and norm weights, which begin as 0 and 1. ``shard_size``: the
    largest file of weights, as transformers takes it ("100KB"). ``changes``: configuration fields instead of
    the shape's.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    own = FAMILIES[family] if name == "tiny" else {}
    config = CONFIG_MAPPING[family](
        **{"tie_word_embeddings": True, **tokens, **SHAPES[name], **own, **changes}
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("_proj.weight"):
                parameter.mul_(projection_scale)
            if noise and parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * noise)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def make_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 16,
    seed: int = 0,
    strength: float = 1.0,
    modules: Iterable[str] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """Write an adapter (LoRA) with random weights for the model at ``base``, a folder or GGUF file, as peft
    does, and return its folder; the same seed writes the same weights.

    ``strength``: how much it changes, 1.0 for as much as the model's own weights do. ``modules``: the linear
    layers that it changes. ``config``: more fields of its configuration.
    """
    import torch
    from safetensors.torch import save_file

    from ..runtime.model.config import read_config
    from ..runtime.model.weights import pieces_of

    chosen = tuple(modules)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for piece in pieces_of(read_config(base)):
        name = piece.name.removesuffix(".weight")
        if name.rpartition(".")[2] in chosen and len(piece.shape) == 2:
            rows, width = piece.shape
            a = torch.randn((rank, width), generator=generator) / width**0.5
            b = torch.randn((rows, rank), generator=generator) * strength * (1 / rank) ** 0.5
            for side, tensor in (("A", a), ("B", b)):
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = tensor.to(getattr(torch, dtype))
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(chosen), **config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(told))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def teach(folder: Path) -> Path:
    """Write the tokenizer and the chat template of a toy's language into the toy's folder, and return the
    folder.

    One character is always one token; there are no special tokens. A message is its role's mark and its text: a
    user's turn of n characters is n + 2 tokens, the mark of the reply included.
    """
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(BPE(vocab={text_of([token]): token for token in range(size)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    user, assistant = text_of([USER]), text_of([ASSISTANT])
    template = (
        f"{{% for message in messages %}}{{{{ '{assistant}' if message.role == 'assistant' else '{user}' }}}}"
        f"{{{{ message.content }}}}{{% endfor %}}{{% if add_generation_prompt %}}{assistant}{{% endif %}}"
    )
    config = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def text_of(tokens: Iterable[int]) -> str:
    return "".join(chr(FIRST_CHARACTER + token) for token in tokens)


def ids_of(text: str) -> list[int]:
    """Token ids of a text in the toys' language."""
    return [ord(character) - FIRST_CHARACTER for character in text]
