"""The model's shape, read from ``config.json`` and ``generation_config.json`` and checked once.

Refuses by name what the decoder does not compute. Knows no weights, no tokenizer, no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import UnsupportedArchitecture
from .families import FAMILIES, Family
from .fields import Fields, read_json

DTYPES = ("float32", "bfloat16", "float16")
ROPE_KINDS = ("default", "linear", "yarn")
MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position settings. ``factor`` stretches the context, 1 for ``default``.

    For ``yarn`` also: ``original`` trained positions, the ramp's ``beta_fast`` and ``beta_slow`` rotations,
    whether its ends are rounded (``truncate``), and the factor on cos and sin (``attention``; None: from
    ``factor``).
    """

    kind: str
    theta: float
    factor: float = 1.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. ``eos_ids``: of both files. ``dtype``: the weights' as stored, None if not said."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    norm_eps: float
    max_context: int
    rope: RopeConfig
    tied_head: bool
    attention_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    dtype: str | None

    def shaping_kv(self) -> dict[str, Any]:
        """The settings that decide what K and V mean, as JSON values: for the namespace of block keys."""
        silent = {"max_context", "eos_ids", "dtype", "tied_head"}
        return {name: value for name, value in asdict(self).items() if name not in silent}


def read_config(folder: Path) -> ModelConfig:
    """Read and check the configuration in a model folder.

    Raises:
        ConfigInvalid: a file or field is missing or wrong; the message names both.
        UnsupportedArchitecture: well-formed, but nothing we compute.
    """
    path = folder / "config.json"
    values = read_json(path)
    family = _family(path, values)
    fields = Fields(path, values, family.defaults)
    _refuse_unserved(fields)
    query_heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    if query_heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"{kv_heads} does not divide {query_heads} attention heads")
    head_dim = fields.integer("head_dim")
    if head_dim % 2:
        raise fields.wrong("head_dim", f"{head_dim} is odd: rotary pairs need an even one")
    rope = _rope(fields)
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        layers=fields.integer("num_hidden_layers", most=MOST_LAYERS),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=fields.integer("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps"),
        max_context=max(fields.integer("max_position_embeddings"), int(rope.original * rope.factor)),
        rope=rope,
        tied_head=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        qk_norm=family.qk_norm,
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


def _refuse_unserved(fields: Fields) -> None:
    if fields.get("quantization_config") is not None:
        raise UnsupportedArchitecture(f"{fields.path}: quantization_config: quantized weights are not served")
    if fields.text("hidden_act") != "silu":
        raise UnsupportedArchitecture(f"{fields.path}: hidden_act: {fields.text('hidden_act')} is not served")
    if _slides(fields):
        raise UnsupportedArchitecture(f"{fields.path}: layer_types: only full_attention layers are served")


def _slides(fields: Fields) -> bool:
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        return any(kind != "full_attention" for kind in kinds)
    windowed = fields.integer("num_hidden_layers") - fields.integer("max_window_layers", least=0)
    return fields.flag("use_sliding_window") and windowed > 0


def _rope(fields: Fields) -> RopeConfig:
    """Both forms: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters`` of transformers 5."""
    inner = fields.object("rope_scaling") or fields.object("rope_parameters") or Fields(fields.path, {}, {})
    defaults = {"rope_theta": fields.get("rope_theta"), "rope_type": inner.get("type") or "default"}
    inner = Fields(inner.path, inner.values, {**_YARN_DEFAULTS, **defaults}, inner.inside)
    kind, theta = inner.text("rope_type"), inner.number("rope_theta")
    partial = inner.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1
    if kind not in ROPE_KINDS or partial != 1 or inner.get("mscale") or inner.get("mscale_all_dim"):
        served = ", ".join(ROPE_KINDS)
        raise UnsupportedArchitecture(
            f"{fields.path}: rope_type {kind} with these settings is not served"
            f" (served: {served}, over the whole head, without mscale)"
        )
    if kind == "default":
        return RopeConfig(kind, theta)
    if kind == "linear":
        return RopeConfig(kind, theta, inner.number("factor"))
    original = "original_max_position_embeddings"
    holder = inner if inner.get(original) is not None else fields
    return RopeConfig(
        kind,
        theta,
        factor=inner.number("factor"),
        original=holder.integer(original if holder is inner else "max_position_embeddings"),
        beta_fast=inner.number("beta_fast"),
        beta_slow=inner.number("beta_slow"),
        truncate=inner.flag("truncate"),
        attention=None if inner.get("attention_factor") is None else inner.number("attention_factor"),
    )


_YARN_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "truncate": True}


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
    name = fields.get("dtype") or fields.get("torch_dtype")
    return name if name in DTYPES else None
