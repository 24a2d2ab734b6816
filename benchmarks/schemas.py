"""Realistic schemas and bad grammars for ``bench grammar``."""

from __future__ import annotations

import json
from typing import Any

from holdfast.runtime.verbs import Grammar, GrammarKind

_ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string"},
        "city": {"type": "string"},
        "zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
        "country": {"enum": ["DE", "ES", "FR", "IT", "NO", "PL", "SE", "UK", "US"]},
    },
    "required": ["street", "city", "country"],
    "additionalProperties": False,
}

REAL: dict[str, dict[str, Any]] = {
    "weather tool": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "address": _ADDRESS,
    "invoice": {
        "type": "object",
        "properties": {
            "number": {"type": "string", "pattern": "^INV-[0-9]{6}$"},
            "date": {"type": "string", "format": "date"},
            "to": _ADDRESS,
            "lines": {
                "type": "array",
                "minItems": 1,
                "maxItems": 50,
                "items": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string", "maxLength": 120},
                        "amount": {"type": "integer", "minimum": 1, "maximum": 9999},
                        "price": {"type": "number", "minimum": 0},
                    },
                    "required": ["text", "amount", "price"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["number", "date", "to", "lines"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["name", "children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "patch": {
        "type": "array",
        "items": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"op": {"const": op}, "path": {"type": "string"}, "value": {}},
                    "required": ["op", "path", "value"],
                    "additionalProperties": False,
                }
                for op in ("add", "replace", "test")
            ]
        },
    },
    "1000 values": {"enum": [f"product-{number:04d}" for number in range(1000)]},
    "200 properties": {
        "type": "object",
        "properties": {f"field_{number}": {"type": "string"} for number in range(200)},
        "required": [f"field_{number}" for number in range(200)],
        "additionalProperties": False,
    },
}
"""Realistic JSON schemas of all sizes, by name."""


def _bomb(schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON, json.dumps(schema))


REFUSED: dict[str, Grammar] = {
    "nested 5,000 deep": Grammar(GrammarKind.JSON, '{"items": ' * 5000 + "{}" + "}" * 5000),
    "100,000 values": _bomb({"enum": [f"value number {number}" for number in range(100_000)]}),
    "3,000 optional properties": _bomb(
        {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(3000)}}
    ),
    "a multiple of 99,991": _bomb({"type": "integer", "multipleOf": 99_991}),
    "regex of counted repeats": Grammar(GrammarKind.REGEX, "(a?){5000}a{5000}"),
    "no regex": Grammar(GrammarKind.REGEX, "("),
    "no schema": _bomb({"type": "nope"}),
}
"""Grammars that the engine must refuse, by name. The benchmark passes them to the engine directly, because the
checks of `sessions` would refuse most of them sooner."""
