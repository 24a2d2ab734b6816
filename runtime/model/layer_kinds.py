"""The kinds of layers a model has: which look back through a window, and by which rotary settings they turn.

Knows the fields that say so; no other part of the shape, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UnsupportedArchitecture
from .fields import Fields
from .rope_settings import LAYER_TYPES, RopeConfig, Ropes

MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What sets a layer's attention apart: tokens it looks back (None: all), and its rotary settings."""

    window: int | None
    rope: RopeConfig


def read_layers(fields: Fields, ropes: Ropes, context: int) -> list[LayerKind]:
    """Each layer's kind; a window that no sequence of ``context`` tokens outgrows is none.

    Raises:
        ConfigInvalid, UnsupportedArchitecture
    """
    layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None
    slides = _sliding(fields, layers, window)
    seen = None if window is None or window >= context else window
    full, sliding = LayerKind(None, ropes.full), LayerKind(seen, ropes.sliding)
    return [sliding if slide else full for slide in slides]


def _sliding(fields: Fields, layers: int, window: int | None) -> Sequence[bool]:
    """Which layers slide: those named, else from ``max_window_layers`` on all but every n-th."""
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
