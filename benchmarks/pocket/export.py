"""Writes the pocket model as a Hugging Face folder in bfloat16, all at once."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from .tokens import END, PAD, token_id


def export(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes model and tokenizer to a folder of their own, then moves the files to their place one by one."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    half = copy.deepcopy(model).bfloat16()
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=[end, pad], pad_token_id=pad
    )
    half.generation_config = generation
    half.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    folder.mkdir(parents=True, exist_ok=True)
    for file in fresh.iterdir():
        file.replace(folder / file.name)
    fresh.rmdir()
