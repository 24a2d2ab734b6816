"""Rotary position embedding: its settings, read from ``config.json`` and checked, and the angles of a
position.

Both spellings of the settings become one object per kind of layer. Angles are computed in each step from the
frequencies: there is no table that a context could outgrow. Sources: Su et al., "RoFormer" (2021); linear
scaling by kaiokendev; dynamic NTK by bloc97 and emozilla; YaRN by Peng et al. (2023); LongRoPE by Ding et
al. (2024); Llama 3.1's own. Formulas and gains as in transformers' ``modeling_rope_utils``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .families import Family
from .fields import LARGEST, Fields

_Read: TypeAlias = Callable[["_Source", int], Mapping[str, Any]]
_Make: TypeAlias = Callable[["RopeConfig", Tensor], Tensor]

ORIGINAL = "original_max_position_embeddings"
LAYER_TYPES = ("full_attention", "sliding_attention")
_ROTATIONS = {"above": 1e-6, "most": 1e6}
_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "truncate": True}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary settings of one kind of layer.

    ``kind``: a key of `ROPE_KINDS`, or ``none`` (no rotation). ``theta``: the base of the frequencies.
    ``dim``: how many numbers of a head are rotated. ``gain``: the factor on cos and sin. ``factor``: how many
    times longer the context is than the ``original`` trained positions. ``beta_fast``, ``beta_slow``,
    ``truncate``: the ends of yarn's ramp in rotations, and whether they are rounded. ``low_freq_factor``,
    ``high_freq_factor``: llama3's bounds in rotations. ``divisors``: longrope's divisors, one per frequency.
    ``query_growth``: how strongly queries grow with their position (`Rope.query_scale`); 0: not.
    """

    kind: str
    theta: float
    dim: int
    factor: float = 1.0
    original: int = 0
    gain: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    divisors: tuple[float, ...] = ()
    query_growth: float = 0.0


UNROTATED = RopeConfig("none", 1.0, 2)
"""The settings of layers without rotary positions: all angles are 0."""


def read_ropes(
    fields: Fields, family: Family, head_dim: int, max_context: int | None
) -> tuple[RopeConfig, RopeConfig, int, list[str]]:
    """Read the rotary settings in ``fields``, for heads of ``head_dim`` numbers. ``max_context``: the most
    tokens of a sequence to serve; None: as many as the model allows. Returns the settings of layers without a
    window, those of layers with one, the most positions that the first allow, and lines for the operator that
    say where the output differs from that of transformers.

    Settings are spelled in one of three ways: ``rope_theta`` with ``rope_scaling``; ``rope_parameters``, as
    in transformers 5; or ``rope_parameters`` with one object for each layer type.

    Raises:
        ConfigInvalid: a field is missing, out of bounds, or contradicts another.
        UnsupportedArchitecture: the decoder does not compute these settings.
    """
    new, scaling = fields.object("rope_parameters"), fields.object("rope_scaling")
    nested = new is not None and any(new.get(kind) is not None for kind in LAYER_TYPES)
    local = family.local_rope
    if new is not None and nested != bool(local):
        form = "an object" if local else "the same settings"
        told = f"{family.architecture} is served with {form} for each type of layer"
        raise fields.unserved("rope_parameters", told)
    if nested and scaling is not None and scaling.values:
        raise fields.wrong("rope_scaling", "contradicts rope_parameters: remove one of them")
    if local and scaling is not None and scaling.get("type") and not scaling.get("rope_type"):
        told = "versions of transformers differ on whether it counts; write rope_type"
        raise scaling.unserved("type", told)
    if local in family.fixed and not nested and fields.number("rope_theta") != fields.number(str(local)):
        raise fields.unserved(
            "rope_theta",
            "versions of transformers differ on whether it counts for layers with a window; write"
            " rope_parameters with an object for each type of layer",
        )
    inner_full, inner_sliding = (new.object(kind) if new and nested else new for kind in LAYER_TYPES)
    settings = _Source(fields, family, head_dim, max_context, scaling or inner_full, "rope_theta")
    full = sliding = settings.read()
    if local:
        sliding = replace(settings, given=inner_sliding, theta=local).read()
    context = settings.context(full)
    served = min(max_context or context, context)
    notes = (*settings.notes(full, served), *settings.notes(sliding, served))
    return full, sliding, context, list(dict.fromkeys(notes))


@dataclass(frozen=True, slots=True)
class _Source:
    """One object of rotary settings in ``config.json``. ``given``: the object inside ``fields``; None: there
    is none.

    ``fields``: the fields around it. ``theta``: the name of the field for theta.
    """

    fields: Fields
    family: Family
    head_dim: int
    max_context: int | None
    given: Fields | None
    theta: str

    def read(self) -> RopeConfig:
        """Read and check the settings of this object."""
        inner = self.inner
        kind = self.family.rope_names.get(inner.text("rope_type"), inner.text("rope_type"))
        if kind not in ROPE_KINDS:
            raise inner.unserved("rope_type", f"{kind} is not served (served: {', '.join(ROPE_KINDS)})")
        dim = self._dim(inner)
        read = dict(ROPE_KINDS[kind][0](self, dim))
        if self.family.scaled_queries:
            if kind == "dynamic":
                raise inner.unserved("rope_type", f"dynamic is not served with {self.family.architecture}")
            original = read.get("original") or inner.integer(ORIGINAL, least=2)
            read |= {"query_growth": inner.number("llama_4_scaling_beta"), "original": original}
        return RopeConfig(kind, inner.number("rope_theta", above=1.0), dim, **read)

    @property
    def inner(self) -> Fields:
        """The object of rotary settings, with defaults for fields that are absent in it."""
        given = self.given or Fields(self.fields.path, {}, {})
        beside = {"rope_theta": self.fields.get(self.theta), "rope_type": given.get("type") or "default"}
        return Fields(given.path, given.values, {**_DEFAULTS, **beside}, given.inside)

    def context(self, rope: RopeConfig) -> int:
        """How many positions the model allows: those stated; with dynamic and yarn, the trained ones times
        the factor if these are more."""
        if rope.kind in ("dynamic", "yarn"):
            return max(self.stated, int(min(rope.original * rope.factor, LARGEST)))
        return self.stated

    def notes(self, rope: RopeConfig, served: int) -> tuple[str, ...]:
        """Lines for the operator: one for each way in which the output within ``served`` tokens differs from
        that of transformers, with what to set to get the same output."""
        notes = []
        if rope.kind == "longrope" and served > rope.original:
            notes.append(
                f"longrope: all sequences are computed with long_factor; transformers has short_factor up to"
                f" {rope.original} tokens; as it does: --max-context {rope.original}"
            )
        if rope.kind == "dynamic" and served > rope.original:
            notes.append(
                f"dynamic rotary positions: beyond {rope.original} tokens transformers' output depends on how a"
                f" prompt is cut, and differs from this; as it does: --max-context {rope.original}"
            )
        if rope.dim < self.head_dim and self.family.partial_note:
            notes.append(f"partial_rotary_factor: {self.family.partial_note}")
        return tuple(f"{self.fields.path}: {note}" for note in notes)

    @property
    def stated(self) -> int:
        """The number of positions that the file states (``max_position_embeddings``)."""
        return self.fields.integer("max_position_embeddings")

    @property
    def original(self) -> int:
        """The trained context in positions, found as transformers finds it: beside the object (where it counts
        for all layers), else inside the object, else the stated positions."""
        where = (self.inner,) if self.family.local_rope else (self.fields, self.inner)
        for holder in where:
            if holder.get(ORIGINAL) is not None:
                return holder.integer(ORIGINAL, least=2)
        return self.fields.integer("max_position_embeddings", least=2)

    def _dim(self, inner: Fields) -> int:
        named = "partial_rotary_factor"
        holder = inner if inner.get(named) is not None else self.fields
        share = holder.number(named) if holder.get(named) is not None else 1.0
        if share != 1.0 and named not in self.family.defaults:
            told = f"{self.family.architecture} is served with rotary positions over the whole head"
            raise holder.unserved(named, told)
        dim = int(self.head_dim * min(share, 1.0))
        if share > 1 or dim % 2 or not dim:
            raise holder.wrong(named, f"{share:g} of a head of {self.head_dim} is not an even part of it")
        return dim


def _read_dynamic(source: _Source, dim: int) -> Mapping[str, Any]:
    if dim < 4:
        raise source.fields.wrong("head_dim", "dynamic rotary settings need at least 4")
    return {"factor": source.inner.number("factor"), "original": source.stated}


def _read_llama3(source: _Source, dim: int) -> Mapping[str, Any]:
    inner = source.inner
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if high <= low:
        raise inner.wrong("high_freq_factor", f"{high:g} is not above low_freq_factor, {low:g}")
    bounds = {"low_freq_factor": low, "high_freq_factor": high}
    return {"factor": inner.number("factor"), "original": source.original, **bounds}


def _read_yarn(source: _Source, dim: int) -> Mapping[str, Any]:
    inner, factor = source.inner, source.inner.number("factor")
    if source.family.local_rope and not inner.flag("truncate"):
        raise inner.unserved("truncate", f"false is not served with {source.family.architecture}")
    mscale, all_dim = inner.optional_number("mscale"), inner.optional_number("mscale_all_dim")
    gain = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    return {
        "factor": factor,
        "original": source.original,
        "gain": inner.optional_number("attention_factor") or gain,
        "beta_fast": inner.number("beta_fast", **_ROTATIONS),
        "beta_slow": inner.number("beta_slow", **_ROTATIONS),
        "truncate": inner.flag("truncate"),
    }


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_longrope(source: _Source, dim: int) -> Mapping[str, Any]:
    """The fields of a longrope `RopeConfig`, with one set of divisors for all sequences: the long one if more
    than the trained context will be served, else the short one.

    transformers changes from the short to the long set when a sequence passes the trained length. Cached keys
    cannot change, so this keeps one set, as vLLM does.
    """
    inner, stated, original = source.inner, source.stated, source.original
    long, short = (inner.numbers(name, dim // 2) for name in ("long_factor", "short_factor"))
    factor = inner.optional_number("factor") or stated / original
    gain = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "factor": factor,
        "original": original,
        "gain": inner.optional_number("attention_factor") or gain,
        "divisors": long if min(source.max_context or stated, stated) > original else short,
    }


# --- angles -------------------------------------------------------------------------------------------------


class Rope:
    """Computes the rotary angles of positions. ``frequencies``: radians per position, fp32 ``[dim / 2]``.

    ``exponents``: the period of a pair of numbers is theta to the power of its exponent; fp32 ``[dim / 2]``.
    Both tensors are on ``device``, which computes: angles are made in every step, and a copy from the host
    would wait for it.
    """

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.config = config
        exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
        frequencies = torch.zeros_like(exponents)
        if config.kind != UNROTATED.kind:
            frequencies = ROPE_KINDS[config.kind][1](config, config.theta**exponents)
        self.frequencies, self.exponents = frequencies.to(device), exponents.to(device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin of the angles at int64 ``positions`` ``[tokens]``, each ``[tokens, dim]`` in ``dtype``;
        the two halves of the last axis are equal."""
        stretched = self.config.kind == "dynamic"
        frequencies = self._by_length(positions) if stretched else self.frequencies
        angles = positions[:, None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.config.gain).to(dtype), (angles.sin() * self.config.gain).to(dtype)

    def query_scale(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The factor on rotated queries at ``positions``, ``[tokens, 1, 1]`` in ``dtype``; None if all
        factors are 1.

        ``1 + query_growth * log(1 + floor(position / original))`` with the numbers of the config, as in Llama
        4.
        """
        if not self.config.query_growth:
            return None
        stretches = torch.floor(positions / self.config.original)
        return (1 + self.config.query_growth * torch.log(1 + stretches)).to(dtype)[:, None, None]

    def _by_length(self, positions: Tensor) -> Tensor:
        """The frequencies of dynamic NTK: for each token those of a sequence that ends with it, ``[tokens,
        dim / 2]``.

        They depend on the position only, so that cached keys stay valid. transformers does the same for a
        token that it generates with a cache; for a prompt longer than the trained context it uses the
        prompt's length.
        """
        config = self.config
        length = (positions + 1).clamp(min=config.original).float()
        growth = config.factor * length / config.original - (config.factor - 1)
        base = config.theta * growth ** (config.dim / (config.dim - 2))
        return 1.0 / base[:, None] ** self.exponents


def _linear(config: RopeConfig, periods: Tensor) -> Tensor:
    """The frequencies of linear scaling. Also used for ``default``, with a factor of 1, and for ``dynamic``,
    which does not read the result."""
    return 1.0 / periods / config.factor


def _longrope(config: RopeConfig, periods: Tensor) -> Tensor:
    return 1.0 / (torch.tensor(config.divisors, dtype=torch.float32) * periods)


def _yarn(config: RopeConfig, periods: Tensor) -> Tensor:
    keep = 1 - _ramp(config)
    return 1.0 / (config.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _llama3(config: RopeConfig, periods: Tensor) -> Tensor:
    """The frequencies of Llama 3.1's scaling: high ones are kept, low ones are divided by the factor, those
    between are interpolated."""
    frequencies = 1.0 / periods
    lengths = 2 * math.pi / frequencies
    low, high = config.low_freq_factor, config.high_freq_factor
    smooth = (config.original / lengths - low) / (high - low)
    between = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    seldom, often = lengths > config.original / low, lengths < config.original / high
    return torch.where(seldom, frequencies / config.factor, torch.where(often, frequencies, between))


def _ramp(config: RopeConfig) -> Tensor:
    """How far yarn stretches each frequency, fp32 ``[dim / 2]``: from 0 for high ones to 1 for low ones."""

    def pair_that_turns(rotations: float) -> float:
        turns = config.original / (rotations * 2 * math.pi)
        return config.dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    return ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


ROPE_KINDS: Mapping[str, tuple[_Read, _Make]] = {
    "default": (lambda source, dim: {}, _linear),
    "linear": (lambda source, dim: {"factor": source.inner.number("factor")}, _linear),
    "dynamic": (_read_dynamic, _linear),
    "llama3": (_read_llama3, _llama3),
    "yarn": (_read_yarn, _yarn),
    "longrope": (_read_longrope, _longrope),
}
"""The served kinds of rotary settings. Of each: what reads the fields of `RopeConfig` that it has beside theta
and dim, and what makes its frequencies, of these settings and theta to the powers of the exponents."""
