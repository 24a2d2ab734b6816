"""How a model's makers want it sampled: read from ``generation_config.json``, used where nobody says otherwise.

Read as transformers' ``generate`` does: without ``do_sample`` greedily, with the repetition penalty in either
case. What the file does not say is off. No torch.
"""

from __future__ import annotations

from pathlib import Path

from ..link.messages import SamplingDefaults
from ..scheduler.sampling_limits import LEAST_PENALTY, MOST_PENALTY
from .fields import Fields, read_json

_REALS = {  # name: (least, most, whether the least itself is allowed)
    "temperature": (0.0, 2.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "typical_p": (0.0, 1.0, False),
    "repetition_penalty": (LEAST_PENALTY, MOST_PENALTY, True),
}


def read_defaults(folder: Path) -> SamplingDefaults:
    """The defaults of the model in ``folder``; without the file greedy.

    Raises:
        ConfigInvalid: the file is not JSON, or a field out of bounds; the message names both.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return SamplingDefaults()
    fields = Fields(path, read_json(path), {"do_sample": False, "temperature": 1.0, "top_k": 0})
    reals = {name: _real(fields, name) for name in _REALS if fields.get(name) is not None}
    top_k = fields.integer("top_k", least=0)
    if fields.flag("do_sample"):
        return SamplingDefaults(top_k=top_k, **reals)
    return SamplingDefaults(repetition_penalty=reals.get("repetition_penalty", 1.0))


def _real(fields: Fields, name: str) -> float:
    least, most, reached = _REALS[name]
    value = fields.get(name)
    number = type(value) in (int, float)
    if not number or not least <= value <= most or (value == least and not reached):
        shown = repr(value)[:60]
        above = "from" if reached else "above"
        raise fields.wrong(name, f"a number {above} {least:g} to {most:g} is expected, not {shown}")
    return float(value)
