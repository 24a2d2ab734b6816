"""What clients send that this server does not serve: fields that have no effect and tools that it cannot run,
which it takes nevertheless, and what it refuses by name.

`IGNORED` is the one table of these fields. The frames of the faces get their fields from it (`accepting`), and
the README's table is made from it: ``python -m holdfast.gateway.cli.protocol`` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec
from msgspec import Meta

from ..sdk.errors import FieldUnsupported, FrameError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "Chat Completions", "Completions", "Messages", "Responses"
UNSERVED_HEADER = "x-holdfast-unserved"
"""The header of an answer that names the types of the tools that were left out."""
MOST_NAMED = 16
"""The most types that the header names: the list in the answer is whole."""
TEXT: Any = str | None
ANY: Any = Any


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that a face takes without effect. ``path``: where it is in the body, with ``[]`` for any
    index. ``why``: it has none. ``form``: its type, if the body's frame gets the field from this row; None: the
    frame has it by itself. ``clients``: the programs of `tests/clients` that send it unasked."""

    face: str
    path: str
    why: str
    form: Any = None
    clients: tuple[str, ...] = ()


_LABEL = "a label for the operator of the service"
_TIER = "there is one class of service"
_CACHED = "all KV is kept"
_EFFORT = "the model reasons as its template has it"
_CLAUDE = ("@anthropic-ai/claude-code (npm)",)
_CODEX = ("@openai/codex (npm)",)

IGNORED = (
    Ignored(CHAT, "metadata", _LABEL, dict[str, Any] | None),
    Ignored(CHAT, "moderation", "nothing is moderated", ANY),
    Ignored(CHAT, "prompt_cache_options", _CACHED, ANY),
    Ignored(CHAT, "prompt_cache_retention", _CACHED, TEXT),
    Ignored(CHAT, "reasoning_effort", _EFFORT, TEXT),
    Ignored(CHAT, "safety_identifier", _LABEL, TEXT),
    Ignored(CHAT, "service_tier", _TIER, TEXT),
    Ignored(CHAT, "store", "the journal keeps conversations, whatever this says", bool | None),
    Ignored(CHAT, "user", _LABEL, TEXT),
    Ignored(CHAT, "verbosity", "the model writes as it likes", TEXT),
    Ignored(COMPLETIONS, "user", _LABEL, TEXT),
    Ignored(MESSAGES, "cache_control", _CACHED, dict[str, Any] | None),
    Ignored(MESSAGES, "context_management", "no edit is applied, and the answer says so", clients=_CLAUDE),
    Ignored(MESSAGES, "diagnostics", "none are made", dict[str, Any] | None),
    Ignored(MESSAGES, "fallbacks", "there is one model", ANY),
    Ignored(MESSAGES, "inference_geo", "there is one region", TEXT),
    Ignored(MESSAGES, "messages[].content[].cache_control", _CACHED, clients=_CLAUDE),
    Ignored(MESSAGES, "metadata", _LABEL, dict[str, Any] | None, _CLAUDE),
    Ignored(MESSAGES, "output_config.effort", _EFFORT, clients=_CLAUDE),
    Ignored(MESSAGES, "service_tier", _TIER, TEXT),
    Ignored(MESSAGES, "speed", "there is one speed", TEXT),
    Ignored(MESSAGES, "system[].cache_control", _CACHED, clients=_CLAUDE),
    Ignored(MESSAGES, "thinking.budget_tokens", _EFFORT),
    Ignored(RESPONSES, "client_metadata", _LABEL, dict[str, Any] | None, _CODEX),
    Ignored(RESPONSES, "max_tool_calls", "it bounds tools that the server runs; the response repeats it"),
    Ignored(RESPONSES, "prompt_cache_retention", _CACHED, TEXT),
    Ignored(RESPONSES, "reasoning", _EFFORT, ANY, _CODEX),
    Ignored(RESPONSES, "safety_identifier", f"{_LABEL}; the response repeats it"),
    Ignored(RESPONSES, "service_tier", _TIER, TEXT),
    Ignored(RESPONSES, "text.verbosity", "the model writes as it likes"),
    Ignored(RESPONSES, "user", f"{_LABEL}; the response repeats it"),
)
"""All fields that are taken without effect, sorted."""


def accepting(form: type[T], face: str) -> type[T]:
    """The struct ``form`` of a body with the fields that `IGNORED` has for a face, by the same name."""
    struct = cast("type[msgspec.Struct]", form)
    fields = [
        (row.path, Annotated[row.form, Meta(description=f"No effect: {row.why}.")], None)
        for row in IGNORED
        if row.face == face and row.form is not None
    ]
    made = msgspec.defstruct(
        struct.__name__, fields, bases=(struct,), module=struct.__module__, kw_only=True, frozen=True
    )
    made.__doc__ = struct.__doc__
    return cast("type[T]", made)


@dataclass(frozen=True, slots=True)
class RefusedFields:
    """What the standard of a face has, and this server refuses by name. ``fields``: by their path in the body,
    with ``[]`` for any index. ``values``: by the path of a field, those that neither it nor the ``type`` of an
    object in it may have."""

    fields: frozenset[str]
    values: Mapping[str, Container[str]] = field(default_factory=dict)

    def __call__(self, path: str, value: Any) -> bool:
        """Whether the field at this path, such as ``messages[0].content[1].type``, or its value is refused."""
        pattern = re.sub(r"\[\d+\]", "[]", path)
        kind = value.get("type") if isinstance(value, dict) else value
        return pattern in self.fields or (isinstance(kind, str) and kind in self.values.get(pattern, ()))


def table() -> list[str]:
    """The lines of the table of `IGNORED`, in Markdown."""
    rows = (f"| {row.face} | `{row.path}` | {row.why} | {', '.join(row.clients)} |" for row in IGNORED)
    return ["| face | field | why it has no effect | sent by |", "|---|---|---|---|", *rows]


# --- tools --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked(Generic[T_co]):
    """A decoded body. ``unserved``: the tools that were left out of it, such as ``tools[8]: web_search``."""

    body: T_co
    unserved: Sequence[str] = ()

    @property
    def headers(self) -> dict[str, str]:
        """The header of the answer that names the types of these tools; none if there are none."""
        return headers_of(self.unserved)


def headers_of(unserved: Sequence[str]) -> dict[str, str]:
    """The header of an answer that names the types of the tools in ``unserved``; none if it is empty."""
    kinds = list(dict.fromkeys(name.partition(": ")[2] for name in unserved))
    return {UNSERVED_HEADER: ", ".join(kinds[:MOST_NAMED])} if kinds else {}


class _WithName(msgspec.Struct):
    name: Any = None


class _Offered(_WithName):
    """What is read of a tool to know whether it is served."""

    type: Any = None
    custom: _WithName | None = None


_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TOOLS: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
_OFFERED: msgspec.json.Decoder[list[_Offered]] = msgspec.json.Decoder(list[_Offered])


def asked(data: bytes, decode: Callable[[bytes], T], unserved: Container[str]) -> Asked[T]:
    """Decode a body without the tools that the server cannot run: those with a ``type`` in ``unserved``.
    The rest of the body keeps its bytes. Raises what ``decode`` does, and ``FieldUnsupported`` for the tool if
    ``tool_choice`` names it, or asks for a call and no other tool is left."""
    try:
        fields = _FIELDS.decode(data) if b'"tools"' in data else {}
        offered = _OFFERED.decode(fields["tools"]) if "tools" in fields else []
        choice = msgspec.json.decode(fields["tool_choice"]) if "tool_choice" in fields else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return Asked(decode(data))
    out = {at: one for at, one in enumerate(offered) if isinstance(one.type, str) and one.type in unserved}
    if not out:
        return Asked(decode(data))
    left = [at for at in range(len(offered)) if at not in out]
    _check_choice(choice, out, others=bool(left))
    if left:
        tools = _TOOLS.decode(fields["tools"])
        fields["tools"] = msgspec.Raw(msgspec.json.encode([tools[at] for at in left]))
    else:
        fields = {name: value for name, value in fields.items() if name not in ("tools", "tool_choice")}
    try:
        body = decode(msgspec.json.encode(fields))
    except FrameError as error:
        raise _renumbered(error, left) from None
    return Asked(body, [f"tools[{at}]: {one.type}" for at, one in out.items()])


def _check_choice(choice: Any, out: dict[int, _Offered], *, others: bool) -> None:
    """Raise ``FieldUnsupported`` if the ``choice`` forces one of the tools ``out``, by their numbers.
    ``others``: there are further tools."""
    mode = choice.get("type") if isinstance(choice, dict) else choice
    if mode in (None, "auto", "none"):
        return
    inner = choice.get(mode, choice) if isinstance(choice, dict) and isinstance(mode, str) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    named = (at for at, one in out.items() if name and name in (one.name, one.custom and one.custom.name))
    at = next(named, None if others else min(out))
    if at is not None:
        param = f"tools[{at}].type"
        told = (
            f"`{param}` {out[at].type!r} is in the standard, but not served here, and `tool_choice` forces it"
        )
        raise FieldUnsupported(told, param)


def _renumbered(error: FrameError, left: Sequence[int]) -> FrameError:
    """The error of a body without some tools, with the numbers that the others have in the whole body."""

    def whole(text: str) -> str:
        return re.sub(r"tools\[(\d+)\]", lambda found: f"tools[{left[int(found[1])]}]", text, count=1)

    param = error.param
    if param is None or not param.startswith("tools["):
        return error
    return type(error)(whole(str(error)), whole(param), error.event_id)
