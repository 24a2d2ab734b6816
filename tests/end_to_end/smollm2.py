"""SmolLM2-135M-Instruct, where `make smollm2` has put it, and transformers on its dequantised weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.runtime.model.folder import fetched_file
from holdfast.sessions.text.tokenizer import ChatTokenizer

FILE = fetched_file("smollm2")
needed = pytest.mark.skipif(not FILE.exists(), reason="SmolLM2 is not fetched: make smollm2")

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Explain photosynthesis to a child of ten.",
    "Translate 'good morning' to Spanish.",
    "List three fruits, one on each line.",
    "What is 12 + 30?",
    "Who wrote Hamlet?",
    "Schreibe einen kurzen Satz über Käse.",
    "Écris une phrase sur l'été à Genève.",
    "日本の首都はどこですか？",
    "Что такое снег?",
    "Write a Python function that adds two numbers.",
    'Return a JSON object with the keys "name" and "age".',
    "Tell me a joke about a cat 🐈.",
    "Why is the sky blue?\nAnswer in two lines.",
    "How many days has February in 2024?",
    "Repeat exactly:   three   spaces\tand a tab",
    "Give me a title for a story about a dragon.",
    "What does HTTP/2 add to HTTP/1.1?",
    "It's late; I'd better go. What should I say?",
)
TURNS = (
    "Hello, my name is Marisol.",
    "I live in Oslo. What can I see there?",
    "Which of these is free?",
    "Say your last answer in one short sentence.",
    "What is my name?",
)


def smollm2_prompts(file: Path, count: int) -> list[list[int]]:
    """Prompts of conversations of two turns, no two alike."""
    tokenizer = ChatTokenizer.load(file)
    opened = "<|im_start|>{0}\n{1}<|im_end|>\n"
    prompts = []
    for number in range(count):
        asked, known = PROMPTS[number % len(PROMPTS)], PROMPTS[(number * 7 + 3) % len(PROMPTS)]
        said = [("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")]
        said += [("user", f"{known} ({number})"), ("assistant", TURNS[number % len(TURNS)]), ("user", asked)]
        text = "".join(opened.format(*message) for message in said) + "<|im_start|>assistant\n"
        prompts.append(tokenizer.encode(text, leads=True))
    return prompts


@dataclass
class Transformers:
    """The model in fp32 and its tokenizer, both read from the GGUF file by transformers."""

    model: Any
    tokenizer: Any

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return ids

    def reply(self, prompt: list[int], new: int) -> list[int]:
        """Greedy tokens, with the end token if it came."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=2,
            )
        said: list[int] = out[0, len(prompt) :].tolist()
        return said


@lru_cache(maxsize=1)
def transformers_on(file: Path) -> Transformers:
    """Load it; half a minute."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    metadata_template = tokenizer.chat_template
    assert metadata_template, "transformers reads the template from the file, too"
    return Transformers(model.eval(), tokenizer)
