"""The model's shape, read from ``config.json`` and ``generation_config.json`` and checked once.

Refuses by name what the decoder does not compute. Knows no weights, no tokenizer, no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingsInvalid, UnsupportedArchitecture
from .families import FAMILIES, NEUTRAL, Family
from .fields import Fields, read_json
from .layer_kinds import LayerKind, read_layers
from .rope_settings import read_ropes

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
UNSERVED = ("quantization_config", "use_bidirectional_attention", "vision_config", "num_local_experts")


@dataclass(frozen=True, slots=True)
class Biases:
    """Which projections have one."""

    qkv: bool
    output: bool
    mlp: bool


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors on embeddings, attention scores and what a sublayer adds; ``logits`` divides them.

    The caps bound scores and logits: ``cap * tanh(x / cap)``.
    """

    embedding: float
    attention: float
    residual: float
    logits: float
    attention_cap: float | None
    logits_cap: float | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape.

    ``kinds``: the kinds of layers; ``kind_of``: which of them each layer is. ``max_context``: positions served.
    ``eos_ids``: of both files. ``dtype``: the weights' as stored, None if not said.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    activation: str
    norm_eps: float
    max_context: int
    kinds: tuple[LayerKind, ...]
    kind_of: tuple[int, ...]
    biases: Biases
    scales: Scales
    tied_head: bool
    eos_ids: tuple[int, ...]
    dtype: str | None

    @property
    def architecture(self) -> str:
        """The family's name, as ``config.json`` has it."""
        return self.family.architecture

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.kind_of)

    def shaping_kv(self) -> dict[str, Any]:
        """The settings that decide what K and V mean, as JSON values: for the namespace of block keys."""
        silent = {"max_context", "eos_ids", "dtype", "tied_head"}
        values = {name: value for name, value in asdict(self).items() if name not in silent}
        made: dict[str, Any] = json.loads(json.dumps(values))
        return made


def read_config(folder: Path, max_context: int | None = None) -> ModelConfig:
    """Read and check the configuration in a model folder; ``max_context``: serve no longer sequences.

    Raises:
        ConfigInvalid: a file or field is missing or wrong; the message names both.
        UnsupportedArchitecture: well-formed, but nothing we compute.
        SettingsInvalid: ``max_context`` is more than the model's own.
    """
    path = folder / "config.json"
    values = read_json(path)
    family = _family(path, values)
    fields = _fields(path, values, family)
    vocab_size, hidden_size = fields.integer("vocab_size"), fields.integer("hidden_size")
    query_heads, kv_heads, head_dim = _heads(fields, hidden_size)
    ropes = read_ropes(fields, family, head_dim, max_context)
    if max_context is not None and max_context > ropes.context:
        raise SettingsInvalid(
            f"--max-context {max_context} is more than the {ropes.context} tokens that {path} allows"
        )
    context = max_context or ropes.context
    layers = read_layers(fields, ropes, context)
    kinds = tuple(dict.fromkeys(layers))
    attention_bias = fields.flag("attention_bias")
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=fields.integer("intermediate_size"),
        activation=_activation(fields, family),
        norm_eps=fields.number("rms_norm_eps"),
        max_context=context,
        kinds=kinds,
        kind_of=tuple(kinds.index(layer) for layer in layers),
        biases=Biases(family.qkv_bias or attention_bias, attention_bias, fields.flag("mlp_bias")),
        scales=_scales(fields, family, hidden_size, head_dim),
        tied_head=fields.flag("tie_word_embeddings"),
        eos_ids=_eos_ids(folder, fields, vocab_size),
        dtype=_stored_dtype(fields),
    )


def _family(path: Path, values: dict[str, Any]) -> Family:
    named = values.get("architectures") or [values.get("model_type")]
    names = named if isinstance(named, list) else [named]
    for family in FAMILIES:
        if names in ([family.architecture], [family.model_type]):
            return family
    served = ", ".join(family.architecture for family in FAMILIES)
    shown = ", ".join(str(name) for name in names)
    raise UnsupportedArchitecture(f"{path}: architecture {shown} is not served (served: {served})")


def _fields(path: Path, values: dict[str, Any], family: Family) -> Fields:
    """The fields this family reads, with its defaults; refuses those that it reads and we do not compute."""
    for name in (*UNSERVED, *family.unserved):
        if values.get(name):
            raise UnsupportedArchitecture(f"{path}: {name}: not served with {family.architecture}")
    deaf = NEUTRAL.keys() - family.defaults.keys()
    heard = {name: value for name, value in values.items() if name not in deaf}
    return Fields(path, heard, {**NEUTRAL, **family.fixed, **family.defaults})


def _heads(fields: Fields, hidden_size: int) -> tuple[int, int, int]:
    """Query heads, KV heads, head_dim."""
    query_heads = fields.integer("num_attention_heads")
    kv_heads = fields.optional_integer("num_key_value_heads") or query_heads
    if query_heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"{kv_heads} does not divide {query_heads} attention heads")
    if fields.get("head_dim") is None and hidden_size % query_heads:
        raise fields.wrong(
            "head_dim", f"missing, and {query_heads} heads do not divide hidden_size {hidden_size}"
        )
    head_dim = fields.optional_integer("head_dim") or hidden_size // query_heads
    if head_dim % 2:
        raise fields.wrong("head_dim", f"{head_dim} is odd: rotary pairs need an even one")
    return query_heads, kv_heads, head_dim


def _activation(fields: Fields, family: Family) -> str:
    name = fields.text(family.activation)
    if name not in ACTIVATIONS:
        raise UnsupportedArchitecture(f"{fields.path}: {family.activation}: {name} is not served")
    return ACTIVATIONS[name]


def _scales(fields: Fields, family: Family, hidden_size: int, head_dim: int) -> Scales:
    width = fields.optional_number("query_pre_attn_scalar") or head_dim
    return Scales(
        embedding=hidden_size**0.5 if family.scaled_embedding else fields.number("embedding_multiplier"),
        attention=fields.optional_number("attention_multiplier") or width**-0.5,
        residual=fields.number("residual_multiplier"),
        logits=fields.number("logits_scaling"),
        attention_cap=fields.optional_number("attn_logit_softcapping"),
        logits_cap=fields.optional_number("final_logit_softcapping"),
    )


def _eos_ids(folder: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    sources = [fields]
    if path.exists():
        sources.append(Fields(path, read_json(path), {}))
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise source.wrong("eos_token_id", f"{token!r} is not an id below vocab_size {vocab_size}")
            found[token] = None
    return tuple(found)


def _stored_dtype(fields: Fields) -> str | None:
    field = "dtype" if fields.get("dtype") else "torch_dtype"
    name = fields.get(field)
    if not name or name == "auto":
        return None
    if name not in DTYPES:
        raise fields.wrong(field, f"{name!r} is not served (served: {', '.join(DTYPES)})")
    return str(name)
