"""The model's shape and default sampling, read from ``config.json`` and ``generation_config.json``.

Everything is checked once, here. Settings that the decoder does not compute are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...kvstore.groups import Windows, split_layers
from ..errors import SettingsInvalid, UnsupportedArchitecture
from ..verbs import LEAST_PENALTY, MOST_PENALTY, SamplingDefaults
from .families import FAMILIES, MULTIMODAL, NEUTRAL, Family, Multimodal
from .fields import Fields, read_object
from .files import ADAPTER, ModelFiles, files_of
from .kv_format import DTYPES
from .quantisation import LinearRule, read_quantisation
from .rope import LAYER_TYPES, UNROTATED, RopeConfig, read_ropes

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
MOST_LAYERS = 4096
UNSERVED = (
    "use_bidirectional_attention",
    "vision_config",
    "num_local_experts",
    "attention_chunk_size",
    "kv_sharing_modes",
    "per_layer_config",
    "transformers_weights",
)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers of one kind have in common. ``window``: how many tokens a token attends to, with itself;
    None: all before it. ``rope``: rotary settings."""

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
    """Factors of a model's computation.

    ``embedding``, ``attention``, ``residual``: factors on the embedding, the attention scores and each
    sublayer's output. ``logits``: the number that logits are divided by. ``attention_cap``, ``logits_cap``:
    soft caps on scores and logits, ``cap * tanh(x / cap)``; None: no cap.
    """

    embedding: float
    attention: float
    residual: float
    logits: float
    attention_cap: float | None
    logits_cap: float | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape and settings.

    ``kinds``: the kinds of layers. ``kind_of``: for each layer its index in ``kinds``. ``mlp_size``: the
    width inside the MLP. ``max_context``: the most tokens of a sequence. ``tied_head``: the output head is
    the embedding. ``eos_ids``: end tokens of ``config.json`` and ``generation_config.json`` together.
    ``dtype``: type of the stored weights; None if the file does not say. ``inside``: the multimodal
    architecture that contains the decoder; None: the checkpoint is a decoder alone. ``quantisation``: how the
    checkpoint's linears are quantised; empty: they are not. ``notes``: lines that an operator should read at
    start.
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
    inside: Multimodal | None = None
    quantisation: tuple[LinearRule, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """The architecture's name, as ``config.json`` has it."""
        return (self.inside or self.family).architecture

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.kind_of)

    @property
    def kv_layers(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each KV group."""
        return split_layers([self.kinds[kind].window for kind in self.kind_of])

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """The window of each KV group."""
        return tuple(self.kinds[self.kind_of[layers[0]]].window for layers in self.kv_layers)

    def windows(self, block_tokens: int) -> Windows:
        """The windows of the KV groups, for blocks of so many tokens."""
        return Windows(self.kv_windows, block_tokens)

    def shaping_kv(self) -> dict[str, Any]:
        """The settings that decide the values of K and V, as a JSON object, for the namespace of block keys.

        The field names are part of the namespace: if one is renamed, blocks on disk are not found any more.
        """
        silent = {"max_context", "eos_ids", "dtype", "tied_head", "inside", "quantisation", "notes"}
        values = {name: value for name, value in asdict(self).items() if name not in silent}
        made: dict[str, Any] = json.loads(json.dumps(values))
        return made


def read_config(folder: Path, max_context: int | None = None) -> ModelConfig:
    """Read and check the configuration in a model folder or GGUF file.

    ``max_context``: the most tokens of a sequence to serve; None: as many as the model allows.

    Raises:
        ConfigInvalid: a file or field is missing or wrong; the message names both.
        UnsupportedArchitecture: well-formed, but the decoder does not compute it.
        SettingsInvalid: ``max_context`` is more than the model's own.
    """
    files = files_of(folder)
    stated = read_object(files, "config.json")
    inside, family, given = _decoder(stated)
    quantisation = read_quantisation(files, stated, given)
    fields = _read_by(family, given, inside)
    tied = fields if inside is None else replace(stated, defaults={"tie_word_embeddings": True})
    vocab_size, hidden_size = fields.integer("vocab_size"), fields.integer("hidden_size")
    query_heads, kv_heads, head_dim = _heads(fields, hidden_size)
    full, sliding, allowed, rope_notes = read_ropes(fields, family, head_dim, max_context)
    if max_context is not None and max_context > allowed:
        raise SettingsInvalid(
            f"--max-context {max_context} is more than the {allowed} tokens that {stated.path} allows"
        )
    context = max_context or allowed
    layers = _layers(fields, family, full, sliding, context)
    kinds = tuple(dict.fromkeys(layers))
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
        biases=Biases(*(fields.flag(name) for name in family.biases)),
        scales=_scales(fields, family, hidden_size, head_dim),
        tied_head=tied.flag("tie_word_embeddings"),
        eos_ids=_eos_ids(files, (stated, fields), vocab_size),
        dtype=_stored_dtype(stated if stated.get("dtype") or stated.get("torch_dtype") else given),
        inside=inside,
        quantisation=quantisation,
        notes=(*_notes(stated, inside, given, family, context), *rope_notes),
    )


def _decoder(stated: Fields) -> tuple[Multimodal | None, Family, Fields]:
    """Find the decoder in ``config.json``: the multimodal architecture around it (None: there is none), its
    family, and the fields that describe it. Raises `UnsupportedArchitecture`."""
    path, named = stated.path, stated.get("architectures") or []
    names = named if isinstance(named, list) else [named]
    kind = stated.get("model_type")
    every: tuple[Family | Multimodal, ...] = (*FAMILIES, *MULTIMODAL)
    found = next((each for each in every if _is_named(names, kind, each)), None)
    if isinstance(found, Family):
        return None, found, stated
    if found is None:
        served = ", ".join(each.architecture for each in every)
        shown = ", ".join(str(name) for name in names or [kind])
        if names and kind is not None:
            shown += f" with model_type {kind}"
        raise UnsupportedArchitecture(f"{path}: architecture {shown} is not served (served: {served})")
    fields = stated.object("text_config") or Fields(path, {}, {}, "text_config.")
    text_type = fields.get("model_type") or found.text_types[0]
    if text_type not in found.text_types:
        served = ", ".join(found.text_types)
        told = f"{text_type} is not served with {found.architecture} (served: {served})"
        raise fields.unserved("model_type", told)
    return found, next(each for each in FAMILIES if each.model_type == text_type), fields


def _is_named(names: list[Any], kind: Any, one: Family | Multimodal) -> bool:
    """Whether a ``config.json`` names the architecture ``one``.

    ``names``: its ``architectures``; ``kind``: its ``model_type``. transformers goes by the model type, so both
    must fit.
    """
    if kind is None:
        return names == [one.architecture]
    own = (one.architecture, *(one.also_named if isinstance(one, Family) else ()))
    return kind == one.model_type and (not names or (len(names) == 1 and names[0] in own))


def _notes(
    stated: Fields, inside: Multimodal | None, given: Fields, family: Family, context: int
) -> list[str]:
    """Lines for the operator: those of a GGUF file, that code in the checkpoint is not run, which parts of a
    multimodal model are not served, and that the file sets a sliding window that the family ignores, but
    transformers' cache applies. ``context``: the most tokens of a sequence."""
    notes = list(stated.get("gguf_notes") or ())
    if stated.path.name == "config.json" and (adapter := stated.path.with_name(ADAPTER)).is_file():
        notes.append(
            f"{adapter}: an adapter beside the model is not used: merge it into the weights to serve it"
        )
    if stated.get("auto_map"):
        notes.append(f"{stated.path}: auto_map is ignored: code in a checkpoint is not run")
    if inside is not None:
        notes.append(f"{inside.architecture}: the text part is served; its vision weights are not loaded")
    window = given.get("sliding_window")
    if "sliding_window" not in family.defaults and type(window) is int and window < context:
        notes.append(
            f"{given.path}: {given.inside}sliding_window is no setting of {family.architecture}: tokens attend"
            f" to all before them; transformers' generate forgets tokens; as it does: --max-context {window}"
        )
    return notes


def _read_by(family: Family, fields: Fields, inside: Multimodal | None) -> Fields:
    """The fields of the decoder as its family reads them: with the family's defaults and usual names. Raises
    `UnsupportedArchitecture` for a setting that the decoder does not compute."""
    for name in (*UNSERVED, *family.unserved, *(inside.unserved if inside else ())):
        if fields.get(name):
            raise fields.unserved(name, f"not served with {(inside or family).architecture}")
    if fields.get("is_causal") is False:
        raise fields.unserved("is_causal", "false is not served")
    ignored = NEUTRAL.keys() - family.defaults.keys()
    read = {name: value for name, value in fields.values.items() if name not in ignored}
    for other, name in family.field_names.items():
        if fields.get(other) is not None:
            if fields.get(name) not in (None, fields.get(other)):
                raise fields.wrong(other, f"contradicts {name}")
            read[name] = fields.get(other)
    return Fields(fields.path, read, {**NEUTRAL, **family.fixed, **family.defaults}, fields.inside)


def _heads(fields: Fields, hidden_size: int) -> tuple[int, int, int]:
    """The number of query heads, the number of KV heads, and head_dim. Raises ``ConfigInvalid`` if they do
    not fit each other."""
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
    said = fields.text(family.activation)
    name = family.activation_names.get(said, said)
    if name not in ACTIVATIONS:
        raise fields.unserved(family.activation, f"{name} is not served")
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


def _eos_ids(files: ModelFiles, stated: Sequence[Fields], vocab_size: int) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for source in (*stated, read_object(files, "generation_config.json", required=False)):
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
    name = name.removeprefix("torch.") if isinstance(name, str) else name
    if name not in DTYPES:
        raise fields.wrong(field, f"{name!r} is not served (served: {', '.join(DTYPES)})")
    return str(name)


def _layers(
    fields: Fields, family: Family, full: RopeConfig, sliding: RopeConfig, context: int
) -> list[LayerKind]:
    """The kind of each layer, in order. ``full``, ``sliding``: rotary settings of layers without and with a
    window. A window of ``context`` tokens or more counts as no window."""
    layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    # A window of 1 is refused: transformers' cache and its attention disagree about it.
    window = fields.optional_integer("sliding_window", least=2) if fields.flag("use_sliding_window") else None
    rotated = _rotated(fields, layers)
    slides = _sliding(fields, layers, window, rotated if family.unrotated_slide else None)
    seen = None if window is None or window >= context else window
    usual = [LayerKind(seen, sliding) if slide else LayerKind(None, full) for slide in slides]
    both = zip(usual, rotated, strict=True)
    return [kind if turns else replace(kind, rope=UNROTATED) for kind, turns in both]


def _rotated(fields: Fields, layers: int) -> Sequence[bool]:
    """For each layer, whether it has rotary positions: by the field ``no_rope_layers`` (1: yes, 0: no);
    without it all layers but every ``no_rope_layer_interval``-th (0: all)."""
    marks = fields.get("no_rope_layers")
    if marks is None:
        period = fields.integer("no_rope_layer_interval", least=0)
        return [not period or (number + 1) % period != 0 for number in range(layers)]
    if not isinstance(marks, list) or len(marks) < layers or any(mark not in (0, 1) for mark in marks):
        raise fields.wrong(
            "no_rope_layers", f"a list of num_hidden_layers = {layers} zeros and ones is expected"
        )
    return [bool(mark) for mark in marks[:layers]]


def _sliding(
    fields: Fields, layers: int, window: int | None, rotated: Sequence[bool] | None
) -> Sequence[bool]:
    """For each layer, whether it has a sliding window: by the field ``layer_types``; without it, and with
    ``rotated``, the layers without rotary positions; with neither, all layers from ``max_window_layers`` on
    but every ``sliding_window_pattern``-th. If ``window`` is None no layer has one. Raises ``ConfigInvalid``,
    ``UnsupportedArchitecture``."""
    types = fields.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", least=0)
        period = fields.integer("sliding_window_pattern", least=0)
        may = [number >= first and not (period and (number + 1) % period == 0) for number in range(layers)]
        if rotated is not None:
            may = [not turns for turns in rotated]
        return [slides and window is not None for slides in may]
    if not isinstance(types, list) or len(types) != layers:
        raise fields.wrong("layer_types", f"a list of num_hidden_layers = {layers} names is expected")
    for kind in types:
        if kind not in LAYER_TYPES:
            raise fields.unserved("layer_types", f"{kind} is not served")
    if window is None and LAYER_TYPES[1] in types:
        raise fields.wrong("layer_types", "has sliding_attention, but sliding_window is not set")
    return [kind == LAYER_TYPES[1] for kind in types]


# --- default sampling ----------------------------------------------------------------------------------------

_BOUNDS = {
    "temperature": {"least": 0.0, "most": 2.0},
    "top_p": {"above": 0.0, "most": 1.0},
    "min_p": {"least": 0.0, "most": 1.0},
    "typical_p": {"above": 0.0, "most": 1.0},
    "repetition_penalty": {"least": LEAST_PENALTY, "most": MOST_PENALTY},
}


def read_defaults(folder: Path) -> SamplingDefaults:
    """The default sampling parameters in a model's ``generation_config.json``; greedy without the file.

    As in transformers' ``generate``: without ``do_sample`` sampling is greedy, but the repetition penalty
    still applies. A field that is absent has no effect.

    Raises:
        ConfigInvalid: the file is not JSON, or a field out of bounds; the message names both.
    """
    defaults = {"do_sample": False, "temperature": 1.0, "top_k": 0}
    fields = read_object(files_of(folder), "generation_config.json", defaults, required=False)
    reals = {
        name: fields.number(name, **its) for name, its in _BOUNDS.items() if fields.get(name) is not None
    }
    # Some files say with -1 that all tokens count.
    top_k = 0 if fields.get("top_k") == -1 else fields.integer("top_k", least=0)
    if fields.flag("do_sample"):
        return SamplingDefaults(top_k=top_k, **reals)
    return SamplingDefaults(repetition_penalty=reals.get("repetition_penalty", 1.0))
