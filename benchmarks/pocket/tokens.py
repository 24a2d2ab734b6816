"""The pocket model's tokenizer: byte-level BPE of its training dialogues, every digit a token, marks of turns
and tools.

It is learnt from the dialogues themselves; the model is not needed for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .dialogues import dialogue
from .script import TOOL_INTRO, TOOL_OUTRO, head, segments

VOCABULARY = 1536
CONTEXT = 8192
END, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL = (PAD, "<|im_start|>", END)
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
_SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set lead = messages[0] if messages and messages[0].role == "system" else none -%}
{%- if lead is not none or tools -%}
  {{- "<|im_start|>system\\n" -}}
  {%- if lead is not none -%}{{- text(lead.content) -}}{%- endif -%}
  {%- if tools -%}
    {%- if lead is not none -%}{{- "\\n\\n" -}}{%- endif -%}
    {{- "@INTRO@" -}}
    {%- for tool in tools -%}
      {%- set known = tool.function if tool.function is defined else tool -%}
      {{- '{"name": ' + known.name | tojson -}}
      {%- for key in ("description", "parameters") if known[key] is defined -%}
        {{- ', "' + key + '": ' + known[key] | tojson -}}
      {%- endfor -%}
      {{- "}\\n" -}}
    {%- endfor -%}
    {{- "@OUTRO@" -}}
  {%- endif -%}
  {{- "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "tool" -%}
    {%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}{{- "<|im_start|>user" -}}{%- endif -%}
    {{- "\\n<tool_response>\\n" + text(message.content) + "\\n</tool_response>" -}}
    {%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}{{- "<|im_end|>\\n" -}}{%- endif -%}
  {%- elif not (loop.first and message.role == "system") -%}
    {{- "<|im_start|>" + message.role + "\\n" + text(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function if call.function is defined else call -%}
      {%- if message.content or not loop.first -%}{{- "\\n" -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' -}}
      {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
      {{- "}\\n</tool_call>" -}}
    {%- endfor -%}
    {{- "<|im_end|>\\n" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
""".replace("@INTRO@", TOOL_INTRO.replace("\n", "\\n")).replace("@OUTRO@", TOOL_OUTRO.replace("\n", "\\n"))
"""The chat template: ChatML with tools in the hermes form. It is append-only: the rendering of a conversation
begins with that of every shorter one, except for the generation prompt and for tool results, which share one
user turn with their neighbours."""


def corpus(dialogues: int = 3000) -> Iterable[str]:
    """The texts of so many dialogues of the training split, from which the tokenizer's merges are learnt."""
    for seed in range(dialogues):
        made = dialogue(-1 - seed, 300, early=True)  # as they were when the first weights were trained
        if (lead := head(made)) is not None:
            yield lead.text
        for exchange in made.exchanges:
            yield from (segment.text for segment in segments(exchange))


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Learn the merges and return the tokenizer; it is the same every time."""
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
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def _without(text: str, marks: Iterable[str]) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text
