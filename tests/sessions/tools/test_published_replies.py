"""Replies of real models, as published in the tests of other engines, read in any pieces.

From vLLM (`tests/tool_parsers`, `tests/tool_use`, Apache-2.0), transformers (Apache-2.0) and llama.cpp
(`tests/test-chat.cpp`, MIT); each case names its source.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.sessions.conversation.items import Tool
from holdfast.sessions.tools.formats import XML_FORMATS, Forms
from holdfast.sessions.tools.forms import CallForm, ReasoningForm
from holdfast.sessions.tools.scanner import (
    CallArguments,
    CallClosed,
    CallOpened,
    PlainText,
    ReasoningText,
)

from .call_pieces import read_all, reasoned, split

TYPES = {
    "string_field": "hello",
    "int_field": 42,
    "float_field": 3.14,
    "bool_field": True,
    "null_field": None,
}
TYPES |= {"array_field": ["a", "b", "c"], "object_field": {"nested": "value"}, "empty_array": []}
TYPES |= {"empty_object": {}}
TYPED = json.dumps(TYPES, indent=2)
ESCAPED = {"quoted": 'He said "hello"', "path": "C:\\Users\\file.txt", "newline": "line1\nline2"}
TOKYO, TIME = {"city": "Tokyo"}, {"timezone": "Asia/Tokyo"}
AREA: dict[str, Any] = {"shape": "rectangle", "dimensions": {"width": 10, "height": 20}, "precision": 2}
CITIES = [
    {"city": city, "state": state, "unit": "fahrenheit"}
    for city, state in (("Dallas", "TX"), ("Orlando", "FL"))
]
RIDDLE = (
    'We need to respond in riddles. The user asks: "What is the weather like in SF?" So we should call '
    'get_current_weather with location "San Francisco, CA". Let\'s do that.\n\nWe will call function '
    "get_current_weather."
)
DEEPSEEK_TWO = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Tokyo", "unit": "celsius"}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>'
    'search_hotels\n```json\n{"location": "Tokyo", "check_in": "2025-01-15"}\n```<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)


def coder(name: str, *parameters: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str, *arguments: tuple[str, str], between: str = "\n") -> str:
    given = (f"<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>" for key, value in arguments)
    return between.join([f"<tool_call>{name}", *given, "</tool_call>"])


def weather(city: dict[str, str]) -> str:
    return coder("get_current_weather", *city.items())


def tool(name: str, /, **types: Any) -> Tool:
    properties = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in types.items()}
    return Tool(name=name, parameters={"type": "object", "properties": properties})


TOOLS = [
    tool("get_current_weather", city="string", state="string", unit="string"),
    tool("calculate_area", shape="string", dimensions="object", precision="integer"),
    tool("test_types", int_param="integer", float_param="float", bool_param="boolean", str_param="string"),
    tool("get_weather", locations="array", temp_units="string"),
    tool("special_function", arg1="integer"),
    tool("special_function_with_opt", arg1="integer", arg2="integer"),
    tool("tool_2req_4opt", req1="string", req2="integer", opt1="string"),
    tool("set_union", value={"type": ["object", "string"]}, amount={"type": ["integer", "string"]}),
    tool("set_nullable_str", name={"type": ["string", "null"]}),
    tool("get_time", city="string"),
]

CASES: list[tuple[str, CallForm, str, str, list[tuple[str, dict[str, Any]]]]] = [
    (
        "granite, vLLM test_granite_tool_parser",
        CallForm.GRANITE,
        '<|tool_call|> [\n  {"name": "get_weather", "arguments": {"city": "Tokyo"}},\n'
        '  {"name": "get_time", "arguments": {"timezone": "Asia/Tokyo"}}\n]',
        "",
        [("get_weather", TOKYO), ("get_time", TIME)],
    ),
    (
        "granite 3.1, types, vLLM test_granite_tool_parser",
        CallForm.GRANITE,
        '<tool_call> [{\n  "name": "test_function",\n  "arguments": ' + TYPED + "\n}]",
        "",
        [("test_function", TYPES)],
    ),
    (
        "granite, text around, vLLM test_granite_tool_parser",
        CallForm.GRANITE,
        'Let me check the weather for you.\n<|tool_call|> [{"name": "get_weather", "arguments": '
        '{"city": "Tokyo"}}]\nI\'ll get that information.',
        "Let me check the weather for you.",
        [("get_weather", TOKYO)],
    ),
    (
        "granite 4, arguments as text, vLLM test_granite4_tool_parser",
        CallForm.HERMES,
        'Here goes the bbox call: \n<tool_call> {"name": "find_bbox", "arguments": '
        '"{\\"a\\": [[23.54, 43.1]]}"} </tool_call> Now the stock price call: \n <tool_call> '
        '{"name": "get_stock_price", "arguments": '
        '{"symbol": "AAPL"}} </tool_call> See?',
        "Here goes the bbox call:Now the stock price call:See?",
        [("find_bbox", {"a": [[23.54, 43.1]]}), ("get_stock_price", {"symbol": "AAPL"})],
    ),
    (
        "phi-4-mini, llama.cpp's template",
        CallForm.PHI4_MINI,
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Tokyo"}}]<|/tool_call|>',
        "",
        [("get_weather", TOKYO)],
    ),
    (
        "phi-4-mini, one object in each tag, llama.cpp's template",
        CallForm.PHI4_MINI,
        '<|tool_call|>{"name": "foo", "arguments": {"a": 1}}<|/tool_call|><|tool_call|>{"name": "bar", '
        '"arguments": {}}<|/tool_call|>',
        "",
        [("foo", {"a": 1}), ("bar", {})],
    ),
    (
        "functools, vLLM test_phi4mini_tool_parser",
        CallForm.FUNCTOOLS,
        'Let me check the weather for you.\nfunctools[\n  {"name": "get_weather", "arguments": '
        '{"city": "Tokyo"}},\n  {"name": "get_time", "arguments": {"timezone": "Asia/Tokyo"}}\n]\n'
        "Would you like to know more?",
        "Let me check the weather for you.",
        [("get_weather", TOKYO), ("get_time", TIME)],
    ),
    (
        "firefunction, llama.cpp test-chat",
        CallForm.FUNCTOOLS,
        ' functools[{"name": "special_function", "arguments": {"arg1": 1}}]',
        "",
        [("special_function", {"arg1": 1})],
    ),
    (
        "deepseek v3, vLLM test_deepseekv3_tool_parser",
        CallForm.DEEPSEEK_V3,
        DEEPSEEK_TWO,
        "",
        [
            ("get_weather", {"city": "Tokyo", "unit": "celsius"}),
            ("search_hotels", {"location": "Tokyo", "check_in": "2025-01-15"}),
        ],
    ),
    (
        "deepseek v3, without the tag of a call, vLLM test_deepseekv3_tool_parser",
        CallForm.DEEPSEEK_V3,
        '<｜tool▁calls▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Tokyo"}\n```'
        "<｜tool▁calls▁end｜>",
        "",
        [("get_weather", TOKYO)],
    ),
    (
        "deepseek v3.1, vLLM test_deepseekv31_tool_parser",
        CallForm.DEEPSEEK_V3,
        "some prefix text<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>foo<｜tool▁sep｜>{"x":1}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>bar<｜tool▁sep｜>{"y":2}<｜tool▁call▁end｜><｜tool▁calls▁end｜> some suffix text',
        "some prefix textsome suffix text",
        [("foo", {"x": 1}), ("bar", {"y": 2})],
    ),
    (
        "command-r, its template",
        CallForm.COMMAND_R,
        'Action: ```json\n[\n    {\n        "tool_name": "get_current_weather",\n        "parameters": {\n'
        '            "format": "fahrenheit"\n        }\n    },\n    {\n        "tool_name": "get_time",\n'
        '        "parameters": {}\n    }\n]\n```',
        "",
        [("get_current_weather", {"format": "fahrenheit"}), ("get_time", {})],
    ),
    (
        "command-r7b, transformers test_chat_parsing",
        CallForm.COMMAND_R7B,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "simple_tool", "parameters": '
        '{"temperature_format": "Celsius"}}\n]<|END_ACTION|>',
        "",
        [("simple_tool", {"temperature_format": "Celsius"})],
    ),
    (
        "qwen3-coder, vLLM test_qwen3coder_tool_parser",
        CallForm.QWEN3_CODER,
        "Sure! Let me check the weather for you." + "\n".join(map(weather, CITIES)),
        "Sure! Let me check the weather for you.",
        [("get_current_weather", city) for city in CITIES],
    ),
    (
        "qwen3-coder, types, vLLM test_qwen3coder_tool_parser",
        CallForm.QWEN3_CODER,
        coder(
            "calculate_area",
            ("shape", "rectangle"),
            ("dimensions", '{"width": 10, \n "height": 20}'),
            ("precision", "2"),
        )
        + coder(
            "test_types",
            ("int_param", "42"),
            ("float_param", "3.14"),
            ("bool_param", "true"),
            ("str_param", "hello world"),
        ),
        "",
        [
            ("calculate_area", AREA),
            (
                "test_types",
                {"int_param": 42, "float_param": 3.14, "bool_param": True, "str_param": "hello world"},
            ),
        ],
    ),
    (
        "qwen3-coder, without the outer tags, vLLM test_qwen3coder_tool_parser",
        CallForm.QWEN3_CODER,
        weather(CITIES[0]).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"),
        "",
        [("get_current_weather", CITIES[0])],
    ),
    (
        "qwen3.5, transformers test_chat_parsing",
        CallForm.QWEN3_CODER,
        coder(
            "get_weather",
            ("locations", '[{"country": "France", "city": "Paris"}]'),
            ("temp_units", "celsius"),
        ),
        "",
        [("get_weather", {"locations": [{"country": "France", "city": "Paris"}], "temp_units": "celsius"})],
    ),
    (
        "seed-oss, llama.cpp test-chat",
        CallForm.SEED_OSS,
        "<seed:tool_call>\n<function=special_function>\n<parameter=arg1>\n42\n</parameter>\n</function>\n"
        "</seed:tool_call>",
        "",
        [("special_function", {"arg1": 42})],
    ),
    (
        "glm 4.5, vLLM test_glm4_moe_tool_parser",
        CallForm.GLM45,
        "I'll help you check the weather. "
        + glm(
            "get_current_weather",
            ("city", "Dallas"),
            ("state", "TX"),
            ("unit", "fahrenheit"),
            between="\n    ",
        )
        + "\n    "
        + glm("get_current_weather", *CITIES[1].items(), between="\n    "),
        "I'll help you check the weather.",
        [("get_current_weather", city) for city in CITIES],
    ),
    (
        "glm 4.5, text around and no arguments, vLLM test_glm4_moe_tool_parser",
        CallForm.GLM45,
        "I will help you.\n\n"
        + glm("get_time", ("city", "Beijing"))
        + "\n\nmeaningwhile, I will also check the time.\n\n<tool_call>get_current_time\n</tool_call>",
        "I will help you.meaningwhile, I will also check the time.",
        [("get_time", {"city": "Beijing"}), ("get_current_time", {})],
    ),
    (
        "glm 4.5, a key without its end, vLLM test_glm4_moe_tool_parser",
        CallForm.GLM45,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Seattle</arg_value>\n"
        "<arg_key>incomplete_arg\n<arg_value>value</arg_value>\n</tool_call>",
        "",
        [("get_weather", {"city": "Seattle", "incomplete_arg": "value"})],
    ),
    (
        "glm 4.7, vLLM test_glm47_moe_tool_parser",
        CallForm.GLM47,
        "Checking.<tool_call>get_current_date</tool_call><tool_call>get_weather<arg_key>city</arg_key>"
        "<arg_value>Beijing</arg_value></tool_call>",
        "Checking.",
        [("get_current_date", {}), ("get_weather", {"city": "Beijing"})],
    ),
    (
        "glm 4.7, llama.cpp test-chat",
        CallForm.GLM47,
        "<tool_call>special_function<arg_key>arg1</arg_key><arg_value>1</arg_value></tool_call>"
        "<tool_call>special_function_with_opt<arg_key>arg1</arg_key><arg_value>1</arg_value>"
        "<arg_key>arg2</arg_key><arg_value>2</arg_value></tool_call>",
        "",
        [("special_function", {"arg1": 1}), ("special_function_with_opt", {"arg1": 1, "arg2": 2})],
    ),
    (
        "ling 3, texts with tags, llama.cpp test-chat",
        CallForm.GLM45,
        glm("tool_2req_4opt", ("req1", "contains </think> and <tool_call> strings"), ("req2", "1"))
        + "\nThe time has been checked.",
        "The time has been checked.",
        [("tool_2req_4opt", {"req1": "contains </think> and <tool_call> strings", "req2": 1})],
    ),
    (
        "ling 3, unions, llama.cpp test-chat",
        CallForm.GLM45,
        glm("set_union", ("value", '{"a": 1}'), ("amount", "7"))
        + glm("set_union", ("value", "plain text"), ("amount", "1abc"))
        + glm("set_nullable_str", ("name", "null"))
        + glm("set_nullable_str", ("name", "123 Main St")),
        "",
        [
            ("set_union", {"value": {"a": 1}, "amount": 7}),
            ("set_union", {"value": "plain text", "amount": "1abc"}),
            ("set_nullable_str", {"name": None}),
            ("set_nullable_str", {"name": "123 Main St"}),
        ],
    ),
    (
        "kimi k2, vLLM test_kimi_k2_tool_parser",
        CallForm.KIMI_K2,
        "Multiple tasks. <|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.get_weather:0 <|tool_call_argument_begin|>{"city": "New York"}'
        "<|tool_call_end|><|tool_call_begin|>get_news:1 <|tool_call_argument_begin|>"
        '{\n  "html": "<div>a</div>"\n} '
        "<|tool_call_end|><|tool_call_begin|>functions.test:2 <|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Multiple tasks.",
        [("get_weather", {"city": "New York"}), ("get_news", {"html": "<div>a</div>"}), ("test", {})],
    ),
    (
        "kimi k2 thinking, llama.cpp test-chat",
        CallForm.KIMI_K2,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.special_function:0<|tool_call_argument_begin|>"
        '{"arg1": 1}<|tool_call_end|><|tool_call_begin|>functions.special_function_with_opt:1'
        '<|tool_call_argument_begin|>{"arg1": 1, "arg2": 2}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        [("special_function", {"arg1": 1}), ("special_function_with_opt", {"arg1": 1, "arg2": 2})],
    ),
    (
        "minimax m1, vLLM test_minimax_tool_parser",
        CallForm.MINIMAX,
        "I'll help you check the weather. <tool_calls>\n"
        + "\n".join(json.dumps({"name": "get_current_weather", "arguments": city}) for city in CITIES)
        + "\n</tool_calls>",
        "I'll help you check the weather.",
        [("get_current_weather", city) for city in CITIES],
    ),
    (
        "minimax m2, vLLM test_minimax_m2_tool_parser",
        CallForm.MINIMAX_M2,
        'Let me check. <minimax:tool_call><invoke name="get_weather"><parameter name="city">Seattle'
        '</parameter><parameter name="days">5</parameter></invoke><invoke name="search">'
        '<parameter name="q">world</parameter></invoke></minimax:tool_call>',
        "Let me check.",
        [("get_weather", {"city": "Seattle", "days": "5"}), ("search", {"q": "world"})],
    ),
    (
        "minimax m2, llama.cpp test-chat",
        CallForm.MINIMAX_M2,
        '<minimax:tool_call>\n<invoke name="empty_args">\n</invoke>\n</minimax:tool_call>'
        '<minimax:tool_call>\n<invoke name="special_function">\n<parameter name="arg1">1</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "",
        [("empty_args", {}), ("special_function", {"arg1": 1})],
    ),
    (
        "gemma 4, vLLM test_gemma4_tool_parser",
        CallForm.GEMMA4,
        'Let me check the weather for you. <|tool_call>call:get-weather{location:<|"|>Paris, {France}<|"|>}'
        "<tool_call|><|tool_call>call:set.status{is_active:true,count:42,score:3.14,left:108.,none:null}"
        '<tool_call|><|tool_call>call:f{nested:{<|"|>3<|"|>:<|"|>value<|"|>},list:[<|"|>a]b<|"|>,[<|"|>c<|"|>]]}'
        "<tool_call|>",
        "Let me check the weather for you.",
        [
            ("get-weather", {"location": "Paris, {France}"}),
            ("set.status", {"is_active": True, "count": 42, "score": 3.14, "left": 108.0, "none": None}),
            ("f", {"nested": {"3": "value"}, "list": ["a]b", ["c"]]}),
        ],
    ),
    (
        "gemma 4, llama.cpp test-chat",
        CallForm.GEMMA4,
        "<|tool_call>call:empty_args{}<tool_call|><|tool_call>call:amount{orig:1.5e10}<tool_call|>"
        '<|tool_call>call:set_config{config:{theme:<|"|>dark<|"|>,count:-3},todos:[],more:{}}<tool_call|>',
        "",
        [
            ("empty_args", {}),
            ("amount", {"orig": 1.5e10}),
            ("set_config", {"config": {"theme": "dark", "count": -3}, "todos": [], "more": {}}),
        ],
    ),
    (
        "functiongemma, vLLM test_functiongemma_tool_parser",
        CallForm.FUNCTIONGEMMA,
        "Let me check. <start_function_call>call:get_weather{location:<escape>San Francisco<escape>,"
        "unit:<escape>celsius<escape>}<end_function_call><start_function_call>call:get_time{timezone:"
        "<escape>UTC<escape>}<end_function_call>",
        "Let me check.",
        [
            ("get_weather", {"location": "San Francisco", "unit": "celsius"}),
            ("get_time", {"timezone": "UTC"}),
        ],
    ),
    (
        "lfm2, vLLM test_lfm2_tool_parser",
        CallForm.LFM2,
        "<|tool_call_start|> [get_candidate_status(candidate_id='12345'), get_weather(), "
        "register_user(name='John Doe', age=37, address={'city': 'San Francisco', 'state': 'CA'}, role=None, "
        "passed_test=True, aliases=['John', 'Johnny']), exec(command='grep -F \"]\" log.txt'), "
        "exec(command='cat > f.py << EOF\nimport csv\nprint(1)\nEOF'), exec(command='printf a\x00b'), "
        "label(tags={'urgent'}), get_weather(city='Martha\\'s Vineyard', metric='\\\"cool units\\\"')]"
        "<|tool_call_end|>\nChecking the current status of candidate ID 12345.",
        "Checking the current status of candidate ID 12345.",
        [
            ("get_candidate_status", {"candidate_id": "12345"}),
            ("get_weather", {}),
            (
                "register_user",
                {
                    "name": "John Doe",
                    "age": 37,
                    "address": {"city": "San Francisco", "state": "CA"},
                    "role": None,
                    "passed_test": True,
                    "aliases": ["John", "Johnny"],
                },
            ),
            ("exec", {"command": 'grep -F "]" log.txt'}),
            ("exec", {"command": "cat > f.py << EOF\nimport csv\nprint(1)\nEOF"}),
            ("exec", {"command": "printf a\x00b"}),
            ("label", {"tags": ["urgent"]}),
            ("get_weather", {"city": "Martha's Vineyard", "metric": '"cool units"'}),
        ],
    ),
    (
        "lfm2, llama.cpp test-chat",
        CallForm.LFM2,
        'Let me check [the](time).<|tool_call_start|>[Calendar.create_event(title="demo", participants=["Al", '
        '"Bob"], metadata={"priority": "high", "reminder": true}), python(code="First\\n\\tsecond \\"hi\\"")]'
        "<|tool_call_end|>",
        "Let me check [the](time).",
        [
            (
                "Calendar.create_event",
                {
                    "title": "demo",
                    "participants": ["Al", "Bob"],
                    "metadata": {"priority": "high", "reminder": True},
                },
            ),
            ("python", {"code": 'First\n\tsecond "hi"'}),
        ],
    ),
    (
        "harmony, a preamble and a call, llama.cpp test-chat",
        CallForm.HARMONY,
        "<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Hello, world!\nWhat's up?<|end|><|start|>assistant<|channel|>commentary to=functions.special_function "
        '<|constrain|>json<|message|>{"arg1": 1}',
        "Hello, world!\nWhat's up?",
        [("special_function", {"arg1": 1})],
    ),
    (
        "harmony, the recipient before the channel, llama.cpp test-chat",
        CallForm.HARMONY,
        ' to=functions.special_function<|channel|>commentary <|constrain|>json<|message|>{"arg1": 1}',
        "",
        [("special_function", {"arg1": 1})],
    ),
    (
        "harmony, a call in the channel of reasoning, llama.cpp test-chat",
        CallForm.HARMONY,
        "<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant to=functions.special_function"
        '<|channel|>analysis <|constrain|>json<|message|>{"arg1": 1}',
        "",
        [("special_function", {"arg1": 1})],
    ),
    (
        "harmony, calls without a content type and without arguments, vLLM test_openai_tool_parser",
        CallForm.HARMONY,
        '<|channel|>commentary to=functions.get_user_location<|message|>{"location": "Tokyo"}<|call|>'
        "<|start|>assistant to=functions.no_args<|channel|>commentary json<|message|><|call|>",
        "",
        [("get_user_location", {"location": "Tokyo"}), ("no_args", {})],
    ),
    (
        "harmony, transformers test_chat_parsing",
        CallForm.HARMONY,
        f"<|channel|>analysis<|message|>{RIDDLE}<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_current_weather <|constrain|>json<|message|>{\n  "location": "San Francisco, CA"\n}',
        "",
        [("get_current_weather", {"location": "San Francisco, CA"})],
    ),
    (
        "llama 3, vLLM test_llama3_json_tool_parser",
        CallForm.LLAMA3_JSON,
        '<|python_tag|>{"name": "searchTool", "parameters": {"query": "test query"}}; '
        '{"name": "getOpenIncidentsTool", "parameters": {}}',
        "",
        [("searchTool", {"query": "test query"}), ("getOpenIncidentsTool", {})],
    ),
    (
        "pythonic, vLLM test_pythonic_tool_parser",
        CallForm.PYTHONIC,
        "[get_weather(city='San Francisco', metric='celsius'), register_user(name='John Doe', age=37, "
        "address={'city': 'San Francisco', 'state': 'CA'}, role=None, passed_test=True, "
        "aliases=['John', 'Johnny'])]",
        "",
        [
            ("get_weather", {"city": "San Francisco", "metric": "celsius"}),
            (
                "register_user",
                {
                    "name": "John Doe",
                    "age": 37,
                    "address": {"city": "San Francisco", "state": "CA"},
                    "role": None,
                    "passed_test": True,
                    "aliases": ["John", "Johnny"],
                },
            ),
        ],
    ),
    (
        "mistral small 3.2, vLLM test_mistral_tool_parser",
        CallForm.MISTRAL,
        '[TOOL_CALLS]add_this_and_that{"a": 3.5, "b": 4}[TOOL_CALLS]get_weather{"city": "Tokyo"}',
        "",
        [("add_this_and_that", {"a": 3.5, "b": 4}), ("get_weather", TOKYO)],
    ),
    (
        "mistral nemo, llama.cpp test-chat",
        CallForm.MISTRAL,
        '[TOOL_CALLS][{"name": "special_function", "arguments": {"arg1": 1}, "id": "123456789"}]',
        "",
        [("special_function", {"arg1": 1})],
    ),
]
for form, opening, closing in (
    (CallForm.GRANITE, "<|tool_call|>", ""),
    (CallForm.PHI4_MINI, "<|tool_call|>", "<|/tool_call|>"),
    (CallForm.FUNCTOOLS, "functools", ""),
):
    escaped = f'{opening}[{{"name": "test_function", "arguments": {json.dumps(ESCAPED)}}}]{closing}'
    CASES.append((f"{form}, escapes", form, escaped, "", [("test_function", ESCAPED)]))


def read(form: CallForm, pieces: list[str], *, cut: bool = False) -> list[Any]:
    parser = Forms(form).call_parser(TOOLS)
    return read_all(parser, pieces, cut=cut)


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_text_and_calls_are_told_apart_in_any_pieces(case: Any, cuts: list[int]) -> None:
    _, form, text, said, calls = case
    events = read(form, split(text, cuts))
    assert "".join(event.text for event in events if isinstance(event, PlainText)) == said
    assert [event.name for event in events if isinstance(event, CallOpened)] == [name for name, _ in calls]
    arguments = [json.loads(event.delta) for event in events if isinstance(event, CallArguments)]
    assert json.dumps(arguments) == json.dumps([given_ for _, given_ in calls])  # 1 is not 1.0
    assert [event for event in events if isinstance(event, CallClosed)] == [CallClosed(True)] * len(calls)
    assert read(form, list(text)) == events == read(form, [text])


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_reply_that_breaks_off_anywhere_is_read_without_a_fault(case: Any) -> None:
    _, form, text, _, calls = case
    for end in range(len(text)):
        events = read(form, [text[:end]], cut=True)
        closed = [event.complete for event in events if isinstance(event, CallClosed)]
        assert len(closed) == sum(isinstance(event, CallOpened) for event in events) <= len(calls)
        assert all(closed[:-1]), "only the last call is broken off"


def test_names_and_arguments_leave_while_they_come() -> None:
    begun = {
        CallForm.GRANITE: '<|tool_call|>[{"name": "f", "arguments": {"city": "Os',
        CallForm.PHI4_MINI: '<|tool_call|>[{"name": "f", "arguments": {"city": "Os',
        CallForm.FUNCTOOLS: 'functools[{"name": "f", "arguments": {"city": "Os',
        CallForm.DEEPSEEK_V31: '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"city": "Os',
        CallForm.COMMAND_R: 'Action:\n```json\n[{"tool_name": "f", "parameters": {"city": "Os',
        CallForm.COMMAND_R7B: '<|START_ACTION|>[{"tool_name": "f", "parameters": {"city": "Os',
        CallForm.QWEN3_CODER: "<tool_call>\n<function=f>\n<parameter=city>\nOs",
        CallForm.KIMI_K2: "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"city": "Os',
        CallForm.MINIMAX: '<tool_calls>\n{"name": "f", "arguments": {"city": "Os',
        CallForm.GEMMA4: '<|tool_call>call:f{city:<|"|>Os',
        CallForm.GLM45: "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Os",
        CallForm.MINIMAX_M2: '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Os',
        CallForm.HARMONY: '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Os',
    }
    for form, text in begun.items():
        parser = Forms(form).call_parser(TOOLS)
        assert list(parser.feed(f"Wait.{text}" if form is not CallForm.HARMONY else text))[-2:] == [
            *([CallOpened("f")] if form not in XML_FORMATS else [CallArguments('{"city": ')]),
            CallArguments('{"city": "Os' if form not in XML_FORMATS else '"Os'),
        ]


BROKEN = [
    (CallForm.GLM45, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>Os", [(False, '{"a": "Os')]),
    (
        CallForm.MINIMAX_M2,
        '<minimax:tool_call><invoke name="f"><parameter name="a">Os',
        [(False, '{"a": "Os')],
    ),
    (
        CallForm.KIMI_K2,
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.bad:0<|tool_call_argument_begin|>{"a": "Os"'
        "<|tool_call_end|><|tool_call_begin|>functions.good:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|> So.",
        [(False, '{"a": "Os"'), (True, "{}")],
    ),
    (
        CallForm.MINIMAX,
        '<tool_calls>\n{"name": "f", "arguments": {"a" 1}}\n</tool_calls> So.',
        [(False, '{"a" ')],
    ),
    (
        CallForm.GEMMA4,
        '<|tool_call>call:f{a:<|"|>Os<|"|>,b}<tool_call|><|tool_call>call:f{a:[1}<tool_call|> So.',
        [(False, '{"a": "Os", "b"'), (False, '{"a": [1')],
    ),
    (CallForm.FUNCTIONGEMMA, "<start_function_call>call:f{a:<escape>Os", [(False, '{"a": "Os')]),
    (
        CallForm.LFM2,
        "<|tool_call_start|>[f(a='Os', g(b=1), h(c=1)]<|tool_call_end|> So.<|tool_call_start|>[f(x=open()), "
        "g(b=2)]<|tool_call_end|> So.<|tool_call_start|>[f(a=1",
        [(False, ""), (False, ""), (True, '{"b": 2}'), (False, "")],
    ),
]


@pytest.mark.parametrize(("form", "text", "calls"), BROKEN)
def test_a_broken_call_is_told_so_and_text_goes_on_behind_it(form: CallForm, text: str, calls: Any) -> None:
    for pieces in ([text], list(text)):
        events, found, given_ = read(form, pieces, cut=True), [], ""
        for event in events:
            match event:
                case CallOpened():
                    given_ = ""
                case CallArguments(delta):
                    given_ += delta
                case CallClosed(complete):
                    found.append((complete, given_))
        assert found == calls
        said = "".join(event.text for event in events if isinstance(event, PlainText))
        assert said == "So." * text.count("So.")


def test_reasoning_in_channels_is_not_text() -> None:
    text = (
        "<|channel|>analysis<|message|>User asks a simple math question: 2+2 = 4. Provide answer.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>2<|return|>"
    )
    thought = ReasoningText("User asks a simple math question: 2+2 = 4. Provide answer.")
    parser = Forms(CallForm.HARMONY).call_parser()
    events = [event for character in text for event in parser.feed(character)]
    events += parser.finish(cut=False)
    assert "".join(event.text for event in events if isinstance(event, ReasoningText)) == thought.text
    assert [event for event in events if isinstance(event, PlainText)] == [PlainText("2")]
    assert events[0] == ReasoningText("U"), "it leaves as it comes"


def test_a_call_in_a_channel_with_arguments_that_are_no_json_fails() -> None:
    text = "<|channel|>commentary to=functions.f code<|message|>foo<|call|>"
    assert read(CallForm.HARMONY, [text]) == [CallOpened("f"), CallClosed(False)]
    parser = Forms(CallForm.HARMONY).parser(parse_calls=False)
    assert read_all(parser, [text]) == [PlainText("foo")], "calls stay text where none are allowed"


TYPED_CASES: list[tuple[Any, str, Any]] = [
    ("integer", "many", "many"),
    ("number", "2.0", 2),
    ("number", "nan", "nan"),
    ("number", "1e999", "1e999"),
    ("boolean", "True", True),
    ("boolean", "yes", False),
    ("string", "null", None),
    ("string", "nullable", "nullable"),
    ("string", "42", "42"),
    ("string", "\n  two\n\n", "\n  two\n\n"),
    ("array", "['a', 1]", ["a", 1]),
    ("object", "{broken", "{broken"),
    ("object", "{1, 2}", "{1, 2}"),
    ({}, "42", "42"),
    ({"type": ["integer", "null"]}, "7", 7),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "7", "7"),
    ({"enum": [1, 2]}, "2", 2),
    ({"const": True}, "true", True),
    ({"type": ["object", "string"]}, "42", "42"),
    ({"anyOf": [{"enum": ["7"]}, {"type": "null"}]}, "7", "7"),
    ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
    ({"$ref": "#/$defs/Loop"}, "x", "x"),
    ({"$ref": "#/$defs/none"}, "x", "x"),
    ({"$ref": "#/$defs/Wide"}, "7", 7),
    ("array", "[" * 5_000, "[" * 5_000),
    ("array", "-" * 5_000, "-" * 5_000),
    ("integer", "9" * 5_000, "9" * 5_000),
]


def test_glm_writes_a_text_as_it_stands() -> None:
    for text, kind, value in (
        ("\n two \n", "string", "\n two \n"),
        ("null", "string", "null"),
        ("null", ["string", "null"], None),
        (" 7\n", "integer", 7),
        ("", "string", ""),
    ):
        parameters = {"type": "object", "properties": {"a": {"type": kind}}}
        for pieces in ([glm("f", ("a", text))], list(glm("f", ("a", text)))):
            parser = Forms(CallForm.GLM45).call_parser([Tool(name="f", parameters=parameters)])
            _, arguments, closed = read_all(parser, pieces)
            assert isinstance(arguments, CallArguments) and json.loads(arguments.delta) == {"a": value}
            assert closed == CallClosed(True)


@pytest.mark.parametrize(("schema", "text", "value"), TYPED_CASES)
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_the_schema_says_what_a_parameter_is(schema: Any, text: str, value: Any, cuts: list[int]) -> None:
    definitions: dict[str, Any] = {"Point": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}}
    definitions["Wide"] = {"type": "integer", "anyOf": [{"$ref": "#/$defs/Wide"}] * 10}
    kind = {"type": schema} if isinstance(schema, str) else schema
    parameters = {"type": "object", "properties": {"a": kind}, "$defs": definitions}
    parser = Forms(CallForm.QWEN3_CODER).call_parser([Tool(name="f", parameters=parameters)])
    events = read_all(parser, split(coder("f", ("a", text)), cuts))
    assert [event for event in events if not isinstance(event, CallArguments)] == [
        CallOpened("f"),
        CallClosed(True),
    ]
    (arguments,) = [event.delta for event in events if isinstance(event, CallArguments)]
    assert json.dumps(json.loads(arguments)) == json.dumps({"a": value})


@pytest.mark.parametrize("code", ["a </function> b", "</function>", "<f>\n</function>\n"])
@pytest.mark.parametrize("by_letter", [False, True])
def test_the_tag_behind_a_call_may_stand_in_a_value(code: str, by_letter: bool) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{code}\n</parameter>\n</function>\n</tool_call>"
    parser = Forms(CallForm.QWEN3_CODER).call_parser([Tool(name="f")])
    found = read_all(parser, list(text) if by_letter else [text])
    assert found == [CallOpened("f"), CallArguments(json.dumps({"a": code})), CallClosed(complete=True)]


def test_a_parameter_counts_once_and_needs_no_closing_tag() -> None:
    text = "<function=f><parameter=a>1<parameter=b>two</function> so"
    opened, closed = CallOpened("f"), CallClosed(True)
    assert read(CallForm.QWEN3_CODER, [text])[:3] == [opened, CallArguments('{"a": "1", "b": "two"}'), closed]
    twice = coder("f", ("a", "1"), ("a", "2")) + "\n\nDone."
    assert read(CallForm.QWEN3_CODER, [twice]) == [
        opened,
        CallArguments('{"a": "1"}'),
        closed,
        PlainText("Done."),
    ]


REASONED = [
    (
        ReasoningForm.COMMAND,
        "<|START_THINKING|>I'm\nthinking<|END_THINKING|>\n<|START_RESPONSE|>Hello, world!\nWhat's up?"
        "<|END_RESPONSE|>",
    ),
    (ReasoningForm.MISTRAL, "[THINK]I'm\nthinking[/THINK]Hello, world!\nWhat's up?"),
    (ReasoningForm.SEED, "<seed:think>I'm\nthinking</seed:think>Hello, world!\nWhat's up?"),
    (ReasoningForm.THINK, "<think>I'm\nthinking</think>\n\nHello, world!\nWhat's up?"),
    (ReasoningForm.GEMMA4, "<|channel>thought\nI'm\nthinking<channel|>Hello, world!\nWhat's up?<channel|>"),
]


def test_reasoning_without_an_end_ends_where_kimi_calls() -> None:
    text = "<think>I need to call\n<|tool_calls_section_begin|><|tool_call_begin|>"
    for pieces in ([text], list(text)):
        parser = Forms(CallForm.KIMI_K2, ReasoningForm.THINK).parser(parse_calls=False)
        said = "<|tool_calls_section_begin|><|tool_call_begin|>"
        assert reasoned(parser, pieces) == ("I need to call", said)


@pytest.mark.parametrize(("form", "text"), REASONED)
@pytest.mark.parametrize("opened", [False, True])
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_each_form_of_reasoning_is_split_off(
    form: ReasoningForm, text: str, opened: bool, cuts: list[int]
) -> None:
    begin = text[: text.index("I'm")]
    pieces = split(text.removeprefix(begin) if opened else text, cuts)
    parser = Forms(reasoning=form, opened=opened).parser(parse_calls=False)
    assert reasoned(parser, pieces) == ("I'm\nthinking", "Hello, world!\nWhat's up?")
