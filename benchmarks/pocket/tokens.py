"""The pocket tokenizer: byte-level BPE of the pocket world, every digit a token, marks of turns and tools.

It is learnt from the dialogues themselves, and knows nothing of the model.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .dialogues import dialogue
from .script import head, segments
from .template import CHAT_TEMPLATE

VOCABULARY = 1536
CONTEXT = 8192
END, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL = (PAD, "<|im_start|>", END)
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
_SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def corpus(dialogues: int = 3000) -> Iterable[str]:
    """Dialogues of the training split to learn the merges from."""
    for seed in range(dialogues):
        made = dialogue(-1 - seed, 300, quoted=False)  # as they were when the first weights were trained
        if (lead := head(made)) is not None:
            yield lead.text
        for exchange in made.exchanges:
            yield from (segment.text for segment in segments(exchange))


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Learns the merges; the same tokenizer every time."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    marks = (*SPECIAL, *MARKS)
    texts = (_without(text, marks) for text in corpus())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of one token."""
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def _without(text: str, marks: Iterable[str]) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text
