"""The metadata of a GGUF file as the fields of a ``config.json`` and a ``generation_config.json``. No torch.

A key below the architecture's name that is not read here could change what the model computes, so it is
refused, unless it is one of `HARMLESS`, or 0 or false.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from .fields import Fields
from .gguf_file import GGUFFile
from .gguf_sampling import sampling_of
from .gguf_tokenizer import DEFAULT, TOKENIZER, Vocabulary, pre_tokenizer_of

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with divisors of the rotary frequencies, ``[head_dim / 2]``, as in Llama 3.1."""

NOTES = "gguf_notes"
"""The field of ``config.json`` with what an operator should know of the file; Hugging Face has none such."""
HARMLESS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """How a GGUF file of one architecture differs from a Hugging Face checkpoint of the same model.

    ``family``: the name of its family in `FAMILIES`. ``fields``: GGUF keys that only some architectures have,
    and the field of ``config.json`` for each. ``interleaved``: the two rows of q or k that rotate together are
    neighbours, ``(0, 1), (2, 3)``; otherwise they are half a head apart, as in Hugging Face checkpoints.
    ``wide``: a number of layers. A model with this many layers has the ``query_pre_attn_scalar`` (attention
    scores are divided by its root) ``hidden / heads``, all others ``head_dim``: GGUF does not store it. None:
    the family has no such field.
    """

    family: str
    fields: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    wide: int | None = None


ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("LlamaForCausalLM", interleaved=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM"),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM"),
    "gemma": GGUFArchitecture("GemmaForCausalLM"),
    "gemma2": GGUFArchitecture(
        "Gemma2ForCausalLM",
        {
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        wide=46,
    ),
    "gemma3": GGUFArchitecture(
        "Gemma3ForCausalLM",
        {
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        wide=62,
    ),
    "granite": GGUFArchitecture(
        "GraniteForCausalLM",
        {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        interleaved=True,
    ),
    "olmo2": GGUFArchitecture("Olmo2ForCausalLM"),
}
"""The served architectures by ``general.architecture`` of a GGUF file, as llama.cpp's
``convert_hf_to_gguf.py`` writes such files."""

_NEEDED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
EPSILON = "attention.layer_norm_rms_epsilon"
_READ = (
    *(EPSILON, "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("rope.freq_base", "rope.dimension_count", "rope.scale_linear"),
    *(f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "attn_factor")),
)


def architecture_of(file: GGUFFile) -> tuple[str, GGUFArchitecture]:
    """The name of the file's architecture, and its entry in `ARCHITECTURES`.

    Raises ``ConfigInvalid`` without a name, ``UnsupportedArchitecture`` for one that is not served.
    """
    parts = file.metadata.get("split.count", 1)
    if type(parts) is not int or parts > 1:
        told = f"one of {parts!r:.20} files is not served: join them with `llama-gguf-split --merge`"
        raise file.fields("split.").unserved("count", told)
    general = file.fields("general.")
    name = general.text("architecture")
    if name not in ARCHITECTURES:
        raise general.unserved("architecture", f"{name} is not served (served: {', '.join(ARCHITECTURES)})")
    return name, ARCHITECTURES[name]


def config_of(file: GGUFFile) -> dict[str, Any]:
    """The fields that the model's ``config.json`` would have.

    Raises ``ConfigInvalid`` or ``UnsupportedArchitecture`` naming the key, ``TensorInvalid`` if the rotary
    factors cannot be read.
    """
    name, architecture = architecture_of(file)
    fields = file.fields(f"{name}.", {"rope.scaling.type": "none"})
    tensors = file.tensors
    made: dict[str, Any] = {"architectures": [architecture.family]}
    made |= {its: fields.integer(key) for key, its in _NEEDED.items()}
    made["rms_norm_eps"] = fields.number(EPSILON)
    made["vocab_size"] = _vocabulary(file, fields)
    heads, hidden = made["num_attention_heads"], made["hidden_size"]
    made["num_key_value_heads"] = fields.optional_integer("attention.head_count_kv") or heads
    head_dim = made["head_dim"] = _head_dim(fields, hidden, heads)
    for key, its in {"rope.freq_base": "rope_theta", **architecture.fields}.items():
        read = fields.optional_integer if its == "sliding_window" else fields.optional_number
        if (value := read(key)) is not None:
            made[its] = value
    if architecture.wide is not None:
        wide = made["num_hidden_layers"] == architecture.wide
        made["query_pre_attn_scalar"] = hidden / heads if wide else head_dim
    if scaling := _scaling(file, fields, head_dim, made["max_position_embeddings"]):
        made["rope_scaling"] = scaling
    made["tie_word_embeddings"] = "output.weight" not in tensors
    made["attention_bias"] = "blk.0.attn_q.bias" in tensors and fields.inside != "qwen2."
    made["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    made["dtype"] = _dtype(file)
    _check_known(fields, architecture)
    made[NOTES] = notes_of(file)
    return made


def generation_of(file: GGUFFile) -> dict[str, Any]:
    """The fields that the model's ``generation_config.json`` would have: the end tokens, and how it samples."""
    return {"eos_token_id": Vocabulary.read(file).ends(), **sampling_of(file)[0]}


def notes_of(file: GGUFFile) -> list[str]:
    """What an operator should know of the file, each one line."""
    fields, source = sampling_of(file)
    told = ", ".join(f"{name} {value:g}" for name, value in fields.items() if name != "do_sample")
    none = (
        f"{file.path}: it says nothing of sampling, which is greedy by default: a small model repeats itself"
    )
    notes = [f"sampling by default: {told} ({source})" if fields else none]
    tokenizer = file.fields(TOKENIZER)
    if tokenizer.get("model") == "gpt2" and pre_tokenizer_of(tokenizer) == DEFAULT:
        notes.append(
            f"{file.path}: tokenizer.ggml.pre: missing: words are cut by llama.cpp's default, which may be"
            " wrong for this model: a newer file has it"
        )
    return notes


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    """The size of a head, from keys or as ``hidden / heads``. Keys, values and rotary positions must have
    the same; raises ``ConfigInvalid`` or ``UnsupportedArchitecture`` if not."""
    key, value = (fields.optional_integer(f"attention.{name}_length") for name in ("key", "value"))
    if key is None and hidden % heads:
        raise fields.wrong("attention.key_length", f"missing, and {heads} heads do not divide {hidden}")
    size = hidden // heads if key is None else key
    if value not in (None, size):
        told = f"{value} for values and {size} for keys is not served"
        raise fields.unserved("attention.value_length", told)
    rotated = fields.optional_integer("rope.dimension_count")
    if rotated not in (None, size):
        raise fields.unserved("rope.dimension_count", f"{rotated} of a head of {size} is not served")
    return size


def _scaling(file: GGUFFile, fields: Fields, head_dim: int, context: int) -> dict[str, Any]:
    """The field ``rope_scaling`` of ``config.json``, from the tensor `ROPE_FACTORS` or from keys; an empty
    object without either. ``context``: the stated positions. Raises ``ConfigInvalid``,
    ``UnsupportedArchitecture``, ``TensorInvalid``."""
    kind = fields.text("rope.scaling.type")
    old = fields.optional_number("rope.scale_linear")
    factor = fields.optional_number("rope.scaling.factor")
    if ROPE_FACTORS in file.tensors:
        if kind not in ("none", "longrope"):
            told = f"{kind} together with the tensor {ROPE_FACTORS} is not served"
            raise fields.unserved("rope.scaling.type", told)
        stored = file.tensors[ROPE_FACTORS]
        stored.check("the metadata ask", (head_dim // 2,), types=("F32",))
        divisors = file.array(stored).view("<f4").tolist()
        both = {"long_factor": divisors, "short_factor": divisors}
        return {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, **both}
    if kind == "none":
        return {} if old in (None, 1.0) else {"rope_type": "linear", "factor": old}
    if kind not in ("linear", "yarn"):
        raise fields.unserved("rope.scaling.type", f"{kind!r:.40} is not served")
    if factor is None:
        raise fields.wrong("rope.scaling.factor", f"missing, rope.scaling.type {kind} asks for it")
    made: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = fields.optional_integer("rope.scaling.original_context_length")
        made["original_max_position_embeddings"] = original or context
        gain = fields.optional_number("rope.scaling.attn_factor")
        if gain is not None:
            made["attention_factor"] = gain * (1.0 + 0.1 * math.log(factor))
    return made


def _vocabulary(file: GGUFFile, fields: Fields) -> int:
    """The number of tokens in the vocabulary. Raises ``ConfigInvalid`` if keys disagree about it; the shape of
    the embedding is checked with those of all weights."""
    tokens = Vocabulary.read(file).tokens
    stated = fields.optional_integer("vocab_size")
    if stated not in (None, len(tokens)):
        raise fields.wrong("vocab_size", f"{stated}, but tokenizer.ggml.tokens has {len(tokens)}")
    return len(tokens)


def _dtype(file: GGUFFile) -> str:
    """The type to serve in: the type of most of the weights; bfloat16 if most are quantised."""
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.dtype] += prod(tensor.shape)
    most = max(counts, key=counts.__getitem__, default="F32")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _check_known(fields: Fields, architecture: GGUFArchitecture) -> None:
    """Raise ``UnsupportedArchitecture`` for a key of the architecture that is not read here and could
    change the computation."""
    known = {*_NEEDED, *_READ, *HARMLESS, *architecture.fields}
    for key, value in fields.values.items():
        off = type(value) in (bool, int, float) and not value
        if key == "attention.causal":
            off = value is True
        if key not in known and not off:
            raise fields.unserved(key, f"{value!r:.40} is not served")
