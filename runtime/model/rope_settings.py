"""Rotary settings: both spellings of ``config.json`` read into one checked object per kind of layer.

Formulas of the gains as in transformers' ``modeling_rope_utils``. Knows fields and numbers; no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UnsupportedArchitecture
from .families import Family
from .fields import LARGEST, Fields

ORIGINAL = "original_max_position_embeddings"
LAYER_TYPES = ("full_attention", "sliding_attention")
_ROTATIONS = {"above": 1e-6, "most": 1e6}
_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "truncate": True}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position settings.

    ``dim``: numbers of a head that turn. ``gain``: the factor on cos and sin. ``factor`` stretches the context
    that was trained, of ``original`` positions. ``yarn``: the ramp's ends in rotations, and whether they are
    rounded. ``llama3``: its bounds in rotations. ``longrope``: one divisor per frequency.
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


@dataclass(frozen=True, slots=True)
class Ropes:
    """A model's settings: of its full and of its sliding layers; the ``context`` the former were made for."""

    full: RopeConfig
    sliding: RopeConfig
    context: int


def read_ropes(fields: Fields, family: Family, head_dim: int, max_context: int | None) -> Ropes:
    """The settings in ``fields``; ``max_context``: what will be served, if less than the model's own.

    ``rope_theta`` beside ``rope_scaling``, or ``rope_parameters`` of transformers 5, or these per layer type.

    Raises:
        ConfigInvalid, UnsupportedArchitecture
    """
    new, scaling = fields.object("rope_parameters"), fields.object("rope_scaling")
    nested = new is not None and any(new.get(kind) is not None for kind in LAYER_TYPES)
    if new is not None and nested != family.local_rope:
        raise UnsupportedArchitecture(
            f"{fields.path}: rope_parameters: {family.architecture} is served with"
            f" {'an object' if family.local_rope else 'the same settings'} for each type of layer"
        )
    inner_full, inner_sliding = (new.object(kind) if new and nested else new for kind in LAYER_TYPES)
    settings = _Source(fields, family, head_dim, max_context, scaling or inner_full, "rope_theta")
    full = sliding = settings.read()
    if family.local_rope:
        sliding = replace(settings, given=inner_sliding, theta="rope_local_base_freq").read()
    return Ropes(full, sliding, settings.context(full))


@dataclass(frozen=True, slots=True)
class _Source:
    """Where rotary settings are read from: an object in ``fields``, or none; ``theta`` names theirs beside."""

    fields: Fields
    family: Family
    head_dim: int
    max_context: int | None
    given: Fields | None
    theta: str

    def read(self) -> RopeConfig:
        """The settings, checked."""
        inner = self.inner
        kind = self.family.rope_names.get(inner.text("rope_type"), inner.text("rope_type"))
        if kind not in ROPE_KINDS:
            raise UnsupportedArchitecture(
                f"{inner.path}: {inner.inside}rope_type: {kind} is not served (served: {', '.join(ROPE_KINDS)})"
            )
        dim = self._dim(inner)
        return RopeConfig(kind, inner.number("rope_theta", above=1.0), dim, **ROPE_KINDS[kind](self, dim))

    @property
    def inner(self) -> Fields:
        """The object with its defaults."""
        given = self.given or Fields(self.fields.path, {}, {})
        beside = {"rope_theta": self.fields.get(self.theta), "rope_type": given.get("type") or "default"}
        return Fields(given.path, given.values, {**_DEFAULTS, **beside}, given.inside)

    def context(self, rope: RopeConfig) -> int:
        """Positions the model was made for: stretched ones, where the stated ones are those before."""
        if rope.kind in ("dynamic", "yarn"):
            return max(self.stated, int(min(rope.original * rope.factor, LARGEST)))
        return self.stated

    @property
    def stated(self) -> int:
        """Positions by the file's own word."""
        return self.fields.integer("max_position_embeddings")

    @property
    def original(self) -> int:
        """The trained context, where transformers looks for it: beside, inside, else the stated one."""
        holders = (holder for holder in (self.fields, self.inner) if holder.get(ORIGINAL) is not None)
        holder = next(holders, None)
        if holder is None:
            return self.fields.integer("max_position_embeddings", least=2)
        return holder.integer(ORIGINAL, least=2)

    def _dim(self, inner: Fields) -> int:
        named = "partial_rotary_factor"
        holder = inner if inner.get(named) is not None else self.fields
        share = holder.number(named) if holder.get(named) is not None else 1.0
        if share != 1.0 and named not in self.family.defaults:
            raise UnsupportedArchitecture(
                f"{holder.path}: {holder.inside}{named}: {self.family.architecture} is served with rotary"
                " positions over the whole head"
            )
        dim = int(self.head_dim * min(share, 1.0))
        if share > 1 or dim % 2 or not dim:
            raise holder.wrong(named, f"{share:g} of a head of {self.head_dim} is not an even part of it")
        return dim


def _default(source: _Source, dim: int) -> Mapping[str, Any]:
    return {}


def _linear(source: _Source, dim: int) -> Mapping[str, Any]:
    return {"factor": source.inner.number("factor")}


def _dynamic(source: _Source, dim: int) -> Mapping[str, Any]:
    if dim < 4:
        raise source.fields.wrong("head_dim", "dynamic rotary settings need at least 4")
    return {"factor": source.inner.number("factor"), "original": source.stated}


def _llama3(source: _Source, dim: int) -> Mapping[str, Any]:
    inner = source.inner
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if high <= low:
        raise inner.wrong("high_freq_factor", f"{high:g} is not above low_freq_factor, {low:g}")
    bounds = {"low_freq_factor": low, "high_freq_factor": high}
    return {"factor": inner.number("factor"), "original": source.original, **bounds}


def _yarn(source: _Source, dim: int) -> Mapping[str, Any]:
    inner, factor = source.inner, source.inner.number("factor")
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


def _longrope(source: _Source, dim: int) -> Mapping[str, Any]:
    """One set of divisors for all sequences: the long where more than the trained context will be served.

    transformers changes from the short to the long as a sequence passes the trained length; keys that are kept
    cannot change. So does vLLM.
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


ROPE_KINDS: Mapping[str, Callable[[_Source, int], Mapping[str, Any]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""The kinds that are served, and what each reads beside theta: fields of `RopeConfig`."""
