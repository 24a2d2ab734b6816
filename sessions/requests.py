"""What a client may ask of a turn: ``TurnRequest``, checked once at birth and trusted below.

Knows nothing of frames; the gateway makes one from ``response.create`` and the session's defaults.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from ..runtime.link.messages import Sampling
from .errors import SamplingInvalid
from .items import Item, Preamble, Tool, checked_item, checked_preamble

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_INTEGER = 2**31 - 1
MAX_SEED = 2**63 - 1


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. Make it with ``checked``.

    ``max_output_tokens`` None: as many as the context holds. ``input``, ``instructions`` and ``tools``
    override the conversation's for this turn alone when they are not None. An ``out_of_band`` turn leaves
    the conversation as it was and may run beside others. Without ``parse_calls`` a call is delivered as
    text.
    """

    sampling: Sampling = Sampling()
    max_output_tokens: int | None = None
    stop: tuple[str, ...] = ()
    out_of_band: bool = False
    input: tuple[Item, ...] | None = None
    instructions: str | None = None
    tools: tuple[Tool, ...] | None = None
    parse_calls: bool = True

    @classmethod
    def checked(
        cls,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        max_output_tokens: int | None = None,
        stop: Sequence[str] = (),
        out_of_band: bool = False,
        input: Sequence[Item] | None = None,  # noqa: A002 - the standard's word
        instructions: str | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
    ) -> TurnRequest:
        """A request within bounds. ``seed`` None draws one.

        Raises ``SamplingInvalid``, ``ItemInvalid`` or ``ToolInvalid``; ``param`` names the field.
        """
        _number("temperature", temperature, 0.0, 2.0)
        _number("top_p", top_p, 0.0, 1.0)
        if top_p == 0:
            raise SamplingInvalid("`top_p` must be above 0", param="top_p")
        _integer("top_k", top_k, 0, MAX_INTEGER)
        if seed is not None:
            _integer("seed", seed, 0, MAX_SEED)
        if max_output_tokens is not None:
            _integer("max_output_tokens", max_output_tokens, 1, MAX_INTEGER)
        if tool_choice not in ("auto", "none"):
            raise SamplingInvalid("`tool_choice` must be auto or none", param="tool_choice")
        preamble = checked_preamble(Preamble(instructions=instructions or "", tools=tuple(tools or ())))
        drawn = secrets.randbits(63) if seed is None else seed
        return cls(
            sampling=Sampling(float(temperature), top_k, float(top_p), drawn),
            max_output_tokens=max_output_tokens,
            stop=_stops(stop),
            out_of_band=out_of_band,
            input=None if input is None else tuple(checked_item(item) for item in input),
            instructions=instructions,
            tools=None if tools is None else preamble.tools,
            parse_calls=tool_choice == "auto",
        )

    def preamble(self, default: Preamble) -> Preamble:
        """The session's preamble with this turn's overrides."""
        instructions = default.instructions if self.instructions is None else self.instructions
        return Preamble(instructions=instructions, tools=default.tools if self.tools is None else self.tools)


def _number(name: str, value: Any, least: float, most: float) -> None:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not least <= value <= most:
        raise SamplingInvalid(f"`{name}` must be a number from {least:g} to {most:g}", param=name)


def _integer(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise SamplingInvalid(f"`{name}` must be an integer from {least} to {most}", param=name)


def _stops(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOPS:
        raise SamplingInvalid(f"At most {MAX_STOPS} stop strings", param="stop")
    if not all(isinstance(text, str) and 1 <= len(text) <= MAX_STOP_CHARACTERS for text in stop):
        raise SamplingInvalid(f"A stop string has 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
    return tuple(stop)
