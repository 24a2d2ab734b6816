"""The metadata of a GGUF file as the fields of a ``config.json`` and a ``generation_config.json``. No torch.

A key below the architecture's name that is not read here could change what the model computes, so it is
refused, unless it is one of `HARMLESS`, or 0 or false.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ConfigInvalid, TensorInvalid, UnsupportedArchitecture
from .gguf_file import GGUFFile
from .gguf_sampling import sampling_of
from .gguf_tokenizer import DEFAULT, Vocabulary, pre_tokenizer_of

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with divisors of the rotary frequencies, ``[head_dim / 2]``, as in Llama 3.1."""

NOTES = "gguf_notes"
"""The field of ``config.json`` with what an operator should know of the file; Hugging Face has none such."""
TABLE = "token_embd.weight"
HARMLESS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """How a GGUF file of one architecture differs from a Hugging Face checkpoint of the same model.

    ``family``: the name of its family in `FAMILIES`. ``fields``: GGUF keys that only some architectures have,
    and the field of ``config.json`` for each. ``fixed``: fields of ``config.json`` that have no GGUF key,
    with their values. ``interleaved``: the two rows of q or k that rotate together are neighbours, ``(0, 1),
    (2, 3)``; otherwise they are half a head apart, as in Hugging Face checkpoints. ``norm_offset``: the
    number that ggml has already added to the stored norm weights. ``wide``: a number of layers. A model with
    this many layers has the ``query_pre_attn_scalar`` (attention scores are divided by its root) ``hidden /
    heads``, all others ``head_dim``: GGUF does not store it. None: the family has no such field.
    """

    family: str
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    norm_offset: float = 0.0
    wide: int | None = None


ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("LlamaForCausalLM", interleaved=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM"),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM"),
    "gemma": GGUFArchitecture("GemmaForCausalLM", norm_offset=1.0),
    "gemma2": GGUFArchitecture(
        "Gemma2ForCausalLM",
        {
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        norm_offset=1.0,
        wide=46,
    ),
    "gemma3": GGUFArchitecture(
        "Gemma3ForCausalLM",
        {
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        {"rope_theta": 1e6, "sliding_window_pattern": 6},
        norm_offset=1.0,
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
_ROPE = ("rope.freq_base", "rope.dimension_count", "rope.scale_linear")
_HEADS = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
_SCALING = {"linear", "yarn"}


def architecture_of(file: GGUFFile) -> tuple[str, GGUFArchitecture]:
    """The name of the file's architecture, and its entry in `ARCHITECTURES`.

    Raises ``ConfigInvalid`` without a name, ``UnsupportedArchitecture`` for one that is not served.
    """
    parts = file.metadata.get("split.count", 1)
    if type(parts) is not int or parts > 1:
        raise UnsupportedArchitecture(
            f"{file.path}: split.count: one of {parts!r:.20} files is not served: join them with"
            " `llama-gguf-split --merge`"
        )
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ConfigInvalid(f"{file.path}: general.architecture: missing")
    if name not in ARCHITECTURES:
        served = ", ".join(ARCHITECTURES)
        raise UnsupportedArchitecture(
            f"{file.path}: general.architecture: {name} is not served (served: {served})"
        )
    return name, ARCHITECTURES[name]


def config_of(file: GGUFFile) -> dict[str, Any]:
    """The fields that the model's ``config.json`` would have.

    Raises ``ConfigInvalid`` or ``UnsupportedArchitecture`` naming the key, ``TensorInvalid`` if the rotary
    factors cannot be read.
    """
    return {**_Reading(file, *architecture_of(file)).config(), NOTES: notes_of(file)}


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
    if file.metadata.get("tokenizer.ggml.model") == "gpt2" and pre_tokenizer_of(file) == DEFAULT:
        notes.append(
            f"{file.path}: tokenizer.ggml.pre: missing: words are cut by llama.cpp's default, which may be"
            " wrong for this model: a newer file has it"
        )
    return notes


@dataclass(frozen=True, slots=True)
class _Reading:
    file: GGUFFile
    name: str
    architecture: GGUFArchitecture

    def config(self) -> dict[str, Any]:
        made: dict[str, Any] = {"architectures": [self.architecture.family], **self.architecture.fixed}
        made |= {its: self.whole(key) for key, its in _NEEDED.items()}
        made["rms_norm_eps"] = self.number("attention.layer_norm_rms_epsilon")
        made["vocab_size"] = self.vocabulary()
        heads, kv_heads = made["num_attention_heads"], self.optional("attention.head_count_kv", whole=True)
        made["num_key_value_heads"] = heads if kv_heads is None else kv_heads
        head_dim = self.head_dim(made["hidden_size"], heads)
        made["head_dim"] = head_dim
        for key, its in self.architecture.fields.items():
            value = self.optional(key, whole=its == "sliding_window")
            if value is not None:
                made[its] = value
        if self.architecture.wide is not None:
            wide = made["num_hidden_layers"] == self.architecture.wide
            made["query_pre_attn_scalar"] = made["hidden_size"] / heads if wide else head_dim
        theta = self.optional("rope.freq_base")
        if theta is not None:
            made["rope_theta"] = theta
        made |= self.scaling(head_dim, made["max_position_embeddings"])
        tensors = self.file.tensors
        made["tie_word_embeddings"] = "output.weight" not in tensors
        made["attention_bias"] = "blk.0.attn_q.bias" in tensors and self.name != "qwen2"
        made["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
        made["dtype"] = self.dtype()
        self.check_known()
        return made

    def head_dim(self, hidden: int, heads: int) -> int:
        """The size of a head, from keys or as ``hidden / heads``. Keys, values and rotary positions must have
        the same; raises ``ConfigInvalid`` or ``UnsupportedArchitecture`` if not."""
        key, value = (self.optional(f"attention.{name}_length", whole=True) for name in ("key", "value"))
        if key is None and hidden % heads:
            raise self.wrong("attention.key_length", f"missing, and {heads} heads do not divide {hidden}")
        size = hidden // heads if key is None else int(key)
        if value is not None and value != size:
            raise self.unserved("attention.value_length", f"{value} for values and {size} for keys")
        rotated = self.optional("rope.dimension_count", whole=True)
        if rotated is not None and rotated != size:
            raise self.unserved("rope.dimension_count", f"{rotated} of a head of {size}")
        return size

    def scaling(self, head_dim: int, context: int) -> dict[str, Any]:
        """The field ``rope_scaling`` of ``config.json`` in an object, from the tensor `ROPE_FACTORS` or from
        keys; an empty object without either. ``context``: the stated positions. Raises ``ConfigInvalid``,
        ``UnsupportedArchitecture``, ``TensorInvalid``."""
        kind = self.file.metadata.get(f"{self.name}.rope.scaling.type", "none")
        if not isinstance(kind, str):
            raise self.wrong("rope.scaling.type", f"a string is expected, not {kind!r:.60}")
        old = self.optional("rope.scale_linear")
        factor = self.optional("rope.scaling.factor")
        if ROPE_FACTORS in self.file.tensors:
            if kind not in ("none", "longrope"):
                raise self.unserved("rope.scaling.type", f"{kind} together with the tensor {ROPE_FACTORS}")
            divisors = self.factors(head_dim)
            both = {"long_factor": divisors, "short_factor": divisors}
            return {"rope_scaling": {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, **both}}
        if kind == "none":
            old = None if old == 1.0 else old
            return {} if old is None else {"rope_scaling": {"rope_type": "linear", "factor": old}}
        if kind not in _SCALING:
            raise self.unserved("rope.scaling.type", f"{kind!r:.40}")
        if factor is None:
            raise self.wrong("rope.scaling.factor", f"missing, rope.scaling.type {kind} asks for it")
        made: dict[str, Any] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = self.optional("rope.scaling.original_context_length", whole=True)
            made["original_max_position_embeddings"] = context if original is None else original
            gain = self.optional("rope.scaling.attn_factor")
            if gain is not None:
                made["attention_factor"] = gain * (1.0 + 0.1 * math.log(factor))
        return {"rope_scaling": made}

    def factors(self, head_dim: int) -> list[float]:
        stored = self.file.tensors[ROPE_FACTORS]
        if stored.kind != "F32" or stored.shape != (head_dim // 2,):
            raise TensorInvalid(
                f"{self.file.path}: {ROPE_FACTORS}: {stored.kind} {list(stored.shape)}, F32 [{head_dim // 2}]"
                " is expected"
            )
        return [float(one) for one in self.file.array(stored).view("<f4")]

    def vocabulary(self) -> int:
        """The number of tokens in the vocabulary. Raises ``ConfigInvalid`` or ``TensorInvalid`` if keys and
        tensors disagree about it."""
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens:
            raise ConfigInvalid(f"{self.file.path}: tokenizer.ggml.tokens: missing, or no array of strings")
        stated = self.optional("vocab_size", whole=True)
        if stated is not None and stated != len(tokens):
            raise self.wrong("vocab_size", f"{stated}, but tokenizer.ggml.tokens has {len(tokens)}")
        table = self.file.tensors.get(TABLE)
        if table is not None and table.shape[0] != len(tokens):
            raise TensorInvalid(
                f"{self.file.path}: {TABLE}: shape {list(table.shape)}, but tokenizer.ggml.tokens has"
                f" {len(tokens)}"
            )
        return len(tokens)

    def dtype(self) -> str:
        """The type to serve in: the type of most of the weights; bfloat16 if most are quantised."""
        counts: dict[str, int] = {}
        for tensor in self.file.tensors.values():
            counts[tensor.kind] = counts.get(tensor.kind, 0) + int(np.prod(tensor.shape))
        most = max(counts, key=lambda kind: counts[kind]) if counts else "F32"
        return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")

    def check_known(self) -> None:
        """Raise ``UnsupportedArchitecture`` for a key of the architecture that is not read here and could
        change the computation."""
        own = f"{self.name}."
        scaling = tuple(
            f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "attn_factor")
        )
        known = {
            *_NEEDED,
            *_ROPE,
            *_HEADS,
            *scaling,
            *HARMLESS,
            *self.architecture.fields,
            "attention.layer_norm_rms_epsilon",
        }
        for key, value in self.file.metadata.items():
            rest, off = key.removeprefix(own), type(value) in (bool, int, float) and not value
            if rest == "attention.causal":
                off = value is True
            if key.startswith(own) and rest not in known and not off:
                raise self.unserved(rest, f"{value!r:.40}")

    def whole(self, key: str) -> int:
        return int(self._needed(key, self.optional(key, whole=True)))

    def number(self, key: str) -> float:
        return float(self._needed(key, self.optional(key)))

    def optional(self, key: str, *, whole: bool = False) -> Any:
        """The value of ``key`` below the architecture's name, which must be a finite number above 0, a whole
        one if ``whole``; None without the key. Raises ``ConfigInvalid``."""
        value = self.file.metadata.get(f"{self.name}.{key}")
        if value is None:
            return None
        kinds = (int,) if whole else (int, float)
        if type(value) not in kinds or not 0 < value < math.inf:
            expected = "a whole number" if whole else "a finite number"
            raise self.wrong(key, f"{expected} above 0 is expected, not {value!r:.60}")
        return value

    def _needed(self, key: str, value: Any) -> Any:
        if value is None:
            raise self.wrong(key, "missing")
        return value

    def wrong(self, key: str, cause: str) -> ConfigInvalid:
        return ConfigInvalid(f"{self.file.path}: {self.name}.{key}: {cause}")

    def unserved(self, key: str, what: str) -> UnsupportedArchitecture:
        return UnsupportedArchitecture(f"{self.file.path}: {self.name}.{key}: {what} is not served")
