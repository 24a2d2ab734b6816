"""Toy models: real Hugging Face folders with random weights, for parity tests and benchmarks.

Random weights of the usual scale only repeat the last token, so that everything "agrees"; with the
projections scaled up the output varies. By themselves they speak in token ids; `teach` gives them a language
of one character per token, for what goes through text.
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
"""Name to shape: Qwen3, tied embeddings, no end token (a run has the length it is given)."""


USER, ASSISTANT = 0, 1
"""The tokens with which the toys' chat template begins a message of either."""

FIRST_CHARACTER = 0x4E00
"""Token 0's character; the others follow it. All are plain letters to every tokenizer."""


def make_toy(
    name: str,
    folder: Path,
    *,
    seed: int = 0,
    projection_scale: float = 3.0,
    dtype: str = "float32",
    shard_size: str = "5GB",
    **changes: Any,
) -> Path:
    """Write toy ``name`` to ``folder`` and return it; the same seed writes the same weights.

    ``projection_scale`` multiplies every projection matrix. ``shard_size``: the largest shard, as
    transformers reads it ("100KB"). ``changes``: configuration fields instead of the shape's.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    shape: dict[str, Any] = {"tie_word_embeddings": True, "eos_token_id": None, **SHAPES[name], **changes}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("_proj.weight"):
                parameter.mul_(projection_scale)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def teach(folder: Path) -> Path:
    """Write tokenizer and chat template of a toy's language into its folder, and return it.

    One character is one token, whatever stands beside it; there are no special tokens. A message is its role's
    mark and its text: a user's turn of n characters is n + 2 tokens, the mark of the reply included.
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
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def text_of(tokens: Iterable[int]) -> str:
    """Tokens in the toys' language."""
    return "".join(chr(FIRST_CHARACTER + token) for token in tokens)


def ids_of(text: str) -> list[int]:
    """The tokens of a text in the toys' language."""
    return [ord(character) - FIRST_CHARACTER for character in text]
