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
    GLM45 = "glm45"
    """``<tool_call>f``, ``<arg_key>a</arg_key>``, ``<arg_value>…</arg_value>``, ``</tool_call>``, each on a
    line: GLM 4.5 and 4.6, Ling 3."""
    GLM47 = "glm47"
    """The same without line breaks: GLM 4.7. Its parser also reads the form `GLM45`, and the other way
    round."""
    KIMI_K2 = "kimi_k2"
    """``<|tool_calls_section_begin|>``, calls, ``<|tool_calls_section_end|>``; a call is
    ``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>``. Kimi K2."""
    MINIMAX = "minimax"
    """``<tool_calls>{"name": "f", "arguments": {…}} …</tool_calls>``: MiniMax M1; with a list inside: Apriel,
    Hunyuan A13B."""
    MINIMAX_M2 = "minimax_m2"
    """``<minimax:tool_call><invoke name="f"><parameter name="a">…</parameter></invoke></minimax:tool_call>``:
    MiniMax M2."""
    GEMMA4 = "gemma4"
    """``<|tool_call>call:f{a:<|"|>…<|"|>,b:1}<tool_call|>``: Gemma 4."""
    FUNCTIONGEMMA = "functiongemma"
    """``<start_function_call>call:f{a:<escape>…<escape>,b:1}<end_function_call>``: FunctionGemma."""
    LFM2 = "lfm2"
    """``<|tool_call_start|>[f(city="Oslo"), g(a=1)]<|tool_call_end|>``: LFM2."""
    NEMOTRON_JSON = "nemotron_json"
    """``<TOOLCALL>[{"name": "f", "arguments": {…}}, …]</TOOLCALL>``: Nemotron Nano 2."""
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
    GEMMA4 = "gemma4"
    """Gemma 4: ``<|channel>thought … <channel|>``."""
