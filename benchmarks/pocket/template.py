"""The chat template of the pocket model: ChatML with tools in the hermes form.

It is append-only: the rendering of a conversation begins with the rendering of every shorter one, but for the
generation prompt and for tool results, which share one user turn with their neighbours.
"""

from __future__ import annotations

from .script import TOOL_INTRO, TOOL_OUTRO

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set lead = messages[0] if messages and messages[0].role == "system" else none -%}
{%- if lead is not none or tools -%}
  {{- "<|im_start|>system\\n" -}}
  {%- if lead is not none -%}{{- text(lead.content) -}}{%- endif -%}
  {%- if tools -%}
    {%- if lead is not none -%}{{- "\\n\\n" -}}{%- endif -%}
    {{- "@INTRO@" -}}
    {%- for tool in tools -%}
      {%- set known = tool.function if tool.function is defined else tool -%}
      {{- '{"name": ' + known.name | tojson -}}
      {%- for key in ("description", "parameters") if known[key] is defined -%}
        {{- ', "' + key + '": ' + known[key] | tojson -}}
      {%- endfor -%}
      {{- "}\\n" -}}
    {%- endfor -%}
    {{- "@OUTRO@" -}}
  {%- endif -%}
  {{- "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "tool" -%}
    {%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}{{- "<|im_start|>user" -}}{%- endif -%}
    {{- "\\n<tool_response>\\n" + text(message.content) + "\\n</tool_response>" -}}
    {%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}{{- "<|im_end|>\\n" -}}{%- endif -%}
  {%- elif not (loop.first and message.role == "system") -%}
    {{- "<|im_start|>" + message.role + "\\n" + text(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function if call.function is defined else call -%}
      {%- if message.content or not loop.first -%}{{- "\\n" -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' -}}
      {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
      {{- "}\\n</tool_call>" -}}
    {%- endfor -%}
    {{- "<|im_end|>\\n" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
""".replace("@INTRO@", TOOL_INTRO.replace("\n", "\\n")).replace("@OUTRO@", TOOL_OUTRO.replace("\n", "\\n"))
