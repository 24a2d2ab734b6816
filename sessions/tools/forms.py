"""The forms in which models write tool calls and reasoning, by name. How each is read is in `formats`."""

from __future__ import annotations

from enum import StrEnum


class CallForm(StrEnum):
    """The forms in which models write tool calls; the values are those of ``--tool-call-parser``."""

    HERMES = "hermes"
    """``<tool_call>{"name": "f", "arguments": {…}}</tool_call>``: Qwen2.5, Qwen3, Hermes, Granite 4, the pocket
    model. One tag may hold several objects, or a list of them."""
    LLAMA3_JSON = "llama3-json"
    """``{"name": "f", "parameters": {…}}; {"name": "g", …}``, as the whole reply."""
    MISTRAL = "mistral"
    """``[TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]`` or ``[TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]g…``."""
    PYTHONIC = "pythonic"
    """``[f(city="Oslo"), g(a=1)]``: Llama 3.2, Llama 4, ToolACE."""
    GRANITE = "granite"
    """``<|tool_call|>[{"name": "f", "arguments": {…}}, …]``: Granite 3. Some write ``<tool_call>`` instead."""
    PHI4_MINI = "phi4-mini"
    """``<|tool_call|>[{"name": "f", "arguments": {…}}, …]<|/tool_call|>``."""
    FUNCTOOLS = "functools"
    """``functools[{"name": "f", "arguments": {…}}, …]``: Firefunction, and Phi-4-mini with vLLM's template."""
    DEEPSEEK_V3 = "deepseek-v3"
    """``<｜tool▁calls▁begin｜>``, calls, ``<｜tool▁calls▁end｜>``; a call is
    ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>f``, its arguments as a block of code, ``<｜tool▁call▁end｜>``.
    DeepSeek V3, R1."""
    DEEPSEEK_V31 = "deepseek-v3.1"
    """``<｜tool▁calls▁begin｜>``, calls, ``<｜tool▁calls▁end｜>``; a call is
    ``<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``. DeepSeek V3.1. Its parser also reads
    the form `DEEPSEEK_V3`, and the other way round."""
    COMMAND_R = "command-r"
    """``Action: ```json [{"tool_name": "f", "parameters": {…}}, …]``, and then the end of the block of code."""
    COMMAND_R7B = "command-r7b"
    """``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {…}}, …]<|END_ACTION|>``."""
    QWEN3_CODER = "qwen3-coder"
    """``<tool_call><function=f><parameter=a>…</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5,
    Nemotron 3."""
    SEED_OSS = "seed-oss"
    """``<seed:tool_call><function=f><parameter=a>…</parameter></function></seed:tool_call>``: Seed-OSS."""
    HARMONY = "harmony"
    """Messages in channels: ``<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>``.
    It has reasoning of its own (the channel ``analysis``). gpt-oss."""


class ReasoningForm(StrEnum):
    """The forms in which models write reasoning before their answer."""

    NONE = "none"
    THINK = "think"
    """``<think>…</think>``."""
    OPENED = "think-opened"
    """``…</think>``: the template writes the opening tag ``<think>``, so the reply begins inside the
    reasoning."""
    COMMAND = "command"
    """Command R7B and Command A: ``<|START_THINKING|>…<|END_THINKING|>``, and tags around the answer."""
    MISTRAL = "mistral"
    """Magistral, Ministral 3: ``[THINK]…[/THINK]``."""
    SEED = "seed"
    """Seed-OSS: ``<seed:think>…</seed:think>``."""
