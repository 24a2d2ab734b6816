"""The model's shape and default sampling, read from ``config.json`` and ``generation_config.json``.

Everything is checked once, here. Settings that the decoder does not compute are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingsInvalid, UnsupportedArchitecture
from ..link.messages import LEAST_PENALTY, MOST_PENALTY, SamplingDefaults
from .families import FAMILIES, NEUTRAL, Family
from .fields import Fields, read_json
from .rope import LAYER_TYPES, RopeConfig, Ropes, read_ropes

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
MOST_LAYERS = 4096
UNSERVED = ("quantization_config", "use_bidirectional_attention", "vision_config", "num_local_experts")


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layer: ``window``, the tokens that it attends to (None: all), and its rotary settings."""

    window: int | None
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class Biases:
    """Which projections have a bias."""

    qkv: bool
    output: bool
    mlp: bool


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors on the embedding, the attention scores and each sublayer's output; logits are divided by
    ``logits``.

    The caps bound attention scores and logits: ``cap * tanh(x / cap)``.
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

    ``kinds``: the kinds of layers; ``kind_of``: the index in it for each layer. ``max_context``: positions
    served. ``eos_ids``: of both files. ``dtype``: of the stored weights; None if the file does not say.
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
        """The number of layers."""
        return len(self.kind_of)

    def shaping_kv(self) -> dict[str, Any]:
        """The settings that decide the values of K and V, as JSON, for the namespace of block keys.

        The names of the fields are part of it: with another name, blocks on disk are not found again.
        """
        silent = {"max_context", "eos_ids", "dtype", "tied_head"}
        values = {name: value for name, value in asdict(self).items() if name not in silent}
        made: dict[str, Any] = json.loads(json.dumps(values))
        return made


def read_config(folder: Path, max_context: int | None = None) -> ModelConfig:
    """Read and check the configuration in a model folder. ``max_context``: the longest sequence to serve.

    Raises:
        ConfigInvalid: a file or field is missing or wrong; the message names both.
        UnsupportedArchitecture: well-formed, but the decoder does not compute it.
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
    layers = _layers(fields, ropes, context)
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
    """The fields that this family reads, with its defaults; refuses those that the decoder does not compute."""
    for name in (*UNSERVED, *family.unserved):
        if values.get(name):
            raise UnsupportedArchitecture(f"{path}: {name}: not served with {family.architecture}")
    ignored = NEUTRAL.keys() - family.defaults.keys()
    read = {name: value for name, value in values.items() if name not in ignored}
    return Fields(path, read, {**NEUTRAL, **family.fixed, **family.defaults})


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


def _layers(fields: Fields, ropes: Ropes, context: int) -> list[LayerKind]:
    """Each layer's kind. A window of at least ``context`` tokens is none."""
    layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None
    slides = _sliding(fields, layers, window)
    seen = None if window is None or window >= context else window
    full, sliding = LayerKind(None, ropes.full), LayerKind(seen, ropes.sliding)
    return [sliding if slide else full for slide in slides]


def _sliding(fields: Fields, layers: int, window: int | None) -> Sequence[bool]:
    """Which layers have a window: by ``layer_types``, else all from ``max_window_layers`` on but every n-th."""
    types = fields.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", least=0)
        period = fields.integer("sliding_window_pattern", least=0)
        may = [number >= first and not (period and (number + 1) % period == 0) for number in range(layers)]
        return [slides and window is not None for slides in may]
    if not isinstance(types, list) or len(types) != layers:
        raise fields.wrong("layer_types", f"a list of num_hidden_layers = {layers} names is expected")
    for kind in types:
        if kind not in LAYER_TYPES:
            raise UnsupportedArchitecture(f"{fields.path}: layer_types: {kind} is not served")
    if window is None and LAYER_TYPES[1] in types:
        raise fields.wrong("layer_types", "has sliding_attention, but sliding_window is not set")
    return [kind == LAYER_TYPES[1] for kind in types]


# --- default sampling ----------------------------------------------------------------------------------------

_BOUNDS = {  # name: (least, most, whether the least itself is allowed)
    "temperature": (0.0, 2.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "typical_p": (0.0, 1.0, False),
    "repetition_penalty": (LEAST_PENALTY, MOST_PENALTY, True),
}


def read_defaults(folder: Path) -> SamplingDefaults:
    """The sampling parameters in a folder's ``generation_config.json``; greedy without the file.

    As in transformers' ``generate``, sampling is greedy without ``do_sample``, and the repetition penalty
    counts in either case. An absent field is off.

    Raises:
        ConfigInvalid: the file is not JSON, or a field out of bounds; the message names both.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return SamplingDefaults()
    fields = Fields(path, read_json(path), {"do_sample": False, "temperature": 1.0, "top_k": 0})
    reals = {name: _real(fields, name) for name in _BOUNDS if fields.get(name) is not None}
    top_k = fields.integer("top_k", least=0)
    if fields.flag("do_sample"):
        return SamplingDefaults(top_k=top_k, **reals)
    return SamplingDefaults(repetition_penalty=reals.get("repetition_penalty", 1.0))


def _real(fields: Fields, name: str) -> float:
    least, most, reached = _BOUNDS[name]
    value = fields.get(name)
    number = type(value) in (int, float)
    if not number or not least <= value <= most or (value == least and not reached):
        shown = repr(value)[:60]
        above = "from" if reached else "above"
        raise fields.wrong(name, f"a number {above} {least:g} to {most:g} is expected, not {shown}")
    return float(value)
