"""GGUF files for tests, written by the `gguf` package from toys in Hugging Face folders.

What llama.cpp's ``convert_hf_to_gguf.py`` changes is changed here in its own words: rows of q and k in pairs,
norms with their offset, names by the package's table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

KINDS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2"}
KINDS |= {
    "gemma": "gemma",
    "gemma3_text": "gemma3",
    "granite": "granite",
    "olmo2": "olmo2",
}
"""Model type to ``general.architecture``."""
PERMUTED, OFFSET = ("llama", "granite"), ("gemma", "gemma2", "gemma3")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LETTERS = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
"""The 256 letters that stand for bytes."""
WORDS = ["Ġt", "he", "Ġthe", "in", "Ġa", "12"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ a", "1 2"]


def vocabulary(size: int) -> tuple[list[str], list[int]]:
    """Tokens and their kinds: special ones, letters, words and unused ones."""
    tokens = [*SPECIAL, *LETTERS, *WORDS]
    kinds = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    padding = [f"[PAD{number}]" for number in range(size - len(tokens))]
    return tokens + padding, kinds + [5] * len(padding)


@dataclass
class Draft:
    """A GGUF file to be written: ``metadata`` by key, ``tensors`` with their kinds by name. Tests change it."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[np.ndarray, str]] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, str(self.metadata["general.architecture"]), use_temp_file=False)
        for key, value in self.metadata.items():
            if key != "general.architecture":
                self._add(writer, key, value)
        for name, (numbers, kind) in self.tensors.items():
            if numbers.dtype == np.uint8:  # packed already
                writer.add_tensor(name, numbers, raw_dtype=gguf.GGMLQuantizationType[kind])
            else:
                quantised = gguf.quantize(numbers.astype(np.float32), gguf.GGMLQuantizationType[kind])
                writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _add(self, writer: gguf.GGUFWriter, key: str, value: Any) -> None:
        adds: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        adds[type(value)](key, value)


def draft(folder: Path, kind: str = "F32") -> Draft:
    """The draft of a toy; its matrices are of ``kind``."""
    config = json.loads((folder / "config.json").read_text())
    name = KINDS[config["model_type"]]
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    codes = {known: code for code, known in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(codes[name], config["num_hidden_layers"])
    for shard in folder.glob("*.safetensors"):
        for its, tensor in load_file(shard).items():
            numbers = tensor.float().numpy()
            if name in PERMUTED:
                for projection, heads in (
                    ("q_proj", "num_attention_heads"),
                    ("k_proj", "num_key_value_heads"),
                ):
                    if projection in its:
                        numbers = _permute(numbers, config[heads])
            if name in OFFSET and its.endswith("norm.weight"):
                numbers = numbers + 1
            stored = names.get_name(its, try_suffixes=(".weight", ".bias"))
            tensors[stored] = (numbers, kind if numbers.ndim == 2 else "F32")
    return Draft({**_metadata(name, config), **tokenizer(config["vocab_size"])}, tensors)


def tokenizer(size: int) -> dict[str, Any]:
    """The tokenizer's keys."""
    tokens, kinds = vocabulary(size)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def _permute(numbers: np.ndarray, heads: int) -> np.ndarray:
    """Halves to pairs, as llama.cpp does it."""
    halves = numbers.reshape(heads, 2, numbers.shape[0] // heads // 2, *numbers.shape[1:])
    return halves.swapaxes(1, 2).reshape(numbers.shape)


def _metadata(name: str, config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "rope.dimension_count": head_dim,
        "vocab_size": config["vocab_size"],
    }
    own = {
        "sliding_window": "attention.sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    if name in ("gemma2", "gemma3", "granite"):
        keys |= {key: config[its] for its, key in own.items() if config.get(its) is not None}
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in keys.items()}}
