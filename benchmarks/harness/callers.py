"""A toy that calls a tool in each reply: a language with a call's pieces as tokens, and draws that force them.

The weights are random; `forced` leaves them one choice after each piece. A call that is rendered from its item
is the same tokens as one that was sampled: a history that is sent again has as many as one that is kept.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from holdfast.sdk import Tool, tool

from ..toys import ASSISTANT, FIRST_CHARACTER, SHAPES, USER, make_toy, text_of

PIECES = (
    '<tool_call>{"name": "step", ',
    '"arguments": {"path": "src/',
    'main.py", "line": ',
    "17}",
    "}</tool_call>",
)
CLOSING = 3
"""The piece whose last character closes the arguments."""
OUTPUT_TOKENS = 48

_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '{assistant}' ~ message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool' ~ '_call>{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
{{- (call.function.arguments | tojson) ~ '}' ~ '</tool_call>' -}}
{%- endfor -%}
{{- '{end}' -}}
{%- else -%}{{- '{user}' ~ message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '{assistant}' -}}{%- endif -%}
"""


def make_caller(model: str, folder: Path, seed: int, dtype: str) -> Path:
    """Write the toy ``model`` with the language of calls, and return its folder."""
    make_toy(model, folder, seed=seed, dtype=dtype, eos_token_id=end_of(model))
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE

    end, pieces = end_of(model), pieces_of(model)
    vocabulary = {text_of([token]): token for token in range(pieces[0])}
    vocabulary |= dict(zip(PIECES, pieces, strict=True)) | {text_of([end]): end}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in PIECES])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = _TEMPLATE
    for name, token in (("assistant", ASSISTANT), ("user", USER), ("end", end)):
        template = template.replace(f"{{{name}}}", text_of([token]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def end_of(model: str) -> int:
    """The token that ends a reply."""
    return int(SHAPES[model]["vocab_size"]) - 1


def pieces_of(model: str) -> list[int]:
    """The tokens of a call's pieces."""
    return [end_of(model) - len(PIECES) + at for at in range(len(PIECES))]


def forced(model: str) -> dict[str, Any]:
    """Sampling fields that make every reply one call, and nothing else: after each piece only the next."""
    chain = [*pieces_of(model), end_of(model)]
    bias = {token: 100.0 if at == 0 else 60.0 for at, token in enumerate(chain)}
    banned = [[one, other] for at, one in enumerate(chain[:-1]) for other in chain if other != chain[at + 1]]
    return {"temperature": 0, "logit_bias": bias, "bad_words": banned, "max_output_tokens": len(chain) + 2}


def words(model: str, count: int, seed: int) -> str:
    """Text of so many tokens."""
    rng = random.Random(seed)
    return "".join(chr(FIRST_CHARACTER + rng.randrange(2, pieces_of(model)[0])) for _ in range(count))


def step_tool(model: str, seed: int) -> Tool:
    """The tool that is called: it answers at once."""
    rng = random.Random(seed)

    @tool
    async def step(path: str, line: int) -> str:
        """Look at a line."""
        return words(model, OUTPUT_TOKENS, rng.randrange(1 << 30))

    return step
