"""Runs chat templates, which are code from outside, in the environment that transformers uses, with limits.

Nothing is computed while a template is compiled. A value, and the whole output, has at most `CHARACTERS`, and a
loop ends when a rendering has used its processor time. Operations that make large values check the first, loops
the second. Other work, such as a filter over many megabytes, cannot be stopped in a thread. So `broken_limit`
first tries a template in a process of its own, under the kernel's limits of memory and time. This file imports
nothing but jinja2, because that process has to start fast.
"""

from __future__ import annotations

import functools
import json
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Environment, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

CHARACTERS = 1 << 26
"""The most characters that one value, or the output, may have: more than a model's context holds."""
NUMBER = 1_000_000
"""The largest width, count or size that a filter or a string method may get as an argument."""
SECONDS = 2.0
"""Processor time that a rendering may use, in seconds. Each message adds `MESSAGE_SECONDS`."""
MESSAGE_SECONDS = 0.001
TICKS = 16
"""Iterations of loops between two looks at the clock."""

CHECK_BYTES = 1 << 30
"""The most memory, in bytes, of the process that tries a template."""
CHECK_SECONDS = 10
"""The most processor time, in seconds, of the process that tries a template."""
WAIT_SECONDS = 120.0
"""Seconds by the clock that the caller waits at most for the process that tries a template."""

_WIDE = re.compile(r"[0-9]{7}|%[^a-zA-Z%]*\*")
"""Finds a width or a precision in a format string that is too large, or that comes from an argument."""
_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_POSITIONS = frozenset({"first", "last", "index", "index0", "length"})
_SIZED = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "wordwrap", "truncate"}
)


class _Budget(threading.local):
    """The processor time that the rendering on this thread may still use."""

    until = float("inf")
    ticks = 0

    def tick(self, iterations: int = 1) -> None:
        """Count iterations. Raises ``SecurityError`` when the time is used up."""
        self.ticks += iterations
        if self.ticks >= TICKS:
            self.ticks = 0
            if time.thread_time() > self.until:
                raise SecurityError("it takes more processor time than a rendering may")


_budget = _Budget()


def _check(characters: int) -> None:
    if characters > CHARACTERS:
        raise SecurityError(f"it makes a value of {characters} characters, more than {CHARACTERS}")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _joined(pieces: Iterable[Any]) -> str:
    """All pieces in one string; each counts as an iteration. Raises ``SecurityError`` when the string gets
    longer than `CHARACTERS`, or the time is used up."""
    found: list[str] = []
    total = 0
    for piece in pieces:
        text = str(piece)
        found.append(text)
        total += len(text)
        if total > CHARACTERS:
            _check(total)
        if len(found) % TICKS == 0:
            _budget.tick(TICKS)
    _budget.tick(1 + len(found) % TICKS)
    return "".join(found)


def _ticking(values: Iterable[Any]) -> Iterator[Any]:
    """The values of a loop; each counts as an iteration."""
    for value in values:
        _budget.tick()
        yield value


def _check_sizes(arguments: Iterable[Any]) -> None:
    for value in arguments:
        if isinstance(value, int) and abs(value) > NUMBER:
            raise SecurityError(f"it asks for {value}, more than {NUMBER}")


def _check_replacement(text: Any, old: Any, new: Any) -> None:
    if all(isinstance(one, str) for one in (text, old, new)):
        times = text.count(old) if old else len(text) + 1
        _check(len(text) + times * max(0, len(new) - len(old)))


class _Generation(Extension):
    """The tag ``generation`` around a reply. Only training needs it; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """Called by jinja2 at the tag: read up to ``endgeneration``. Returns the body, to be rendered without
        the tag."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Unfolded(CodeGenerator):
    """Stops jinja2 from computing constants when a template is compiled: they are computed at rendering."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible()
        return super()._output_child_to_const(node, frame, finalize)


class _Dict:
    """What templates get as ``dict``: it can be called, but does not lead to Python's class ``dict``."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """A dictionary with the given keys and one value for all, as ``dict.fromkeys`` makes it."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """jinja2's ``namespace``; it refuses names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        found = dict(*rest, **kwargs)
        for name in found:
            _Namespace._check_name(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check_name(name)  # the base class keeps its own data in such attributes
        super().__setitem__(name, value)

    @staticmethod
    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no names that begin with an underscore, as {name!r}")


class Sandbox(ImmutableSandboxedEnvironment):
    """The jinja2 environment of all chat templates."""

    code_generator_class = _Unfolded
    intercepted_binops = frozenset({"*", "+", "%", "**"})
    concat = staticmethod(_joined)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols]
        )
        for name in _SIZED & self.filters.keys():
            self._check_before(name, lambda *args, **named: _check_sizes([*args, *named.values()]))
        self._check_before("replace", lambda _, *args, **named: _check_replacement(*args[:3]))
        self._check_before("format", lambda text, *args, **named: _check_format(text))
        self._check_before("join", lambda _, values, *args, **named: _check_join(values, args[:1]))
        self.filters["tojson"] = _tojson
        self.filters |= {"_ticking": _ticking, "_joined": _joined}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def _check_before(self, name: str, check: Callable[..., None]) -> None:
        """Make the filter ``name`` call ``check`` with its arguments before it runs."""
        real = self.filters[name]

        @functools.wraps(real)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return real(*args, **kwargs)

        self.filters[name] = checked

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The syntax tree of a template, changed so that loops count their iterations (`_ticking`) and
        concatenations check their length (`_joined`)."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_ticking", [], [], None, None, lineno=loop.lineno)
        _measure(tree)
        tree.set_environment(self)
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute of ``obj`` or, without one, an item, as the base class finds it. Most are items of
        messages and positions in a loop; those are found without its checks and exceptions."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _LOOP_POSITIONS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operation. Raises ``SecurityError`` if its result would be too large."""
        if operator == "+":
            if type(left) is str and type(right) is str:
                _check(len(left) + len(right))
                return left + right
            _check(_size(left) + _size(right))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    _check(_size(value) * times)
            _check_bits(left, right, lambda one, other: one + other)
        elif operator == "%":
            _check_format(left)
        elif isinstance(left, int) and isinstance(right, int) and right > 0:
            _check_bits(left, right, lambda one, _: one * right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as there
        """Call a function. Raises ``SecurityError`` if it is a string method with too large a result."""
        if type(__obj) is Macro:  # as the base class calls it in the end
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return __obj(__context.eval_ctx, *args, **kwargs)
        name = getattr(__obj, "__name__", "")
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(text, str):
            if name in _SIZED:
                _check_sizes([*args, *kwargs.values()])
            elif name == "replace" and len(args) > 1:
                _check_replacement(text, args[0], args[1])
            elif name in ("format", "format_map"):
                _check_format(text)
            elif name == "join" and args:
                args = (list(args[0]), *args[1:])
                _check_join(args[0], [text])
        return super().call(__context, __obj, *args, **kwargs)


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise SecurityError("it formats a value wider than it may")


def _check_join(values: Any, between: Iterable[Any]) -> None:
    if isinstance(values, list | tuple):
        gap = sum(map(_size, between))
        _check(sum(map(_size, values)) + gap * len(values))


def _check_bits(left: Any, right: Any, bits: Callable[[int, int], int]) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check(bits(left.bit_length(), right.bit_length()) // 8)


def _measure(tree: nodes.Node) -> None:
    """Replace each ``a ~ b`` of the tree by a filter that checks the length while it joins."""
    for name, value in tree.iter_fields():
        children = value if isinstance(value, list) else [value]
        for at, child in enumerate(children):
            if not isinstance(child, nodes.Node):
                continue
            _measure(child)
            if isinstance(child, nodes.Concat):
                pieces = nodes.List(child.nodes, lineno=child.lineno)
                child = nodes.Filter(pieces, "_joined", [], [], None, None, lineno=child.lineno)
                if isinstance(value, list):
                    value[at] = child
                else:
                    setattr(tree, name, child)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson`` of transformers, which does not escape characters for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def _environment() -> Environment:
    return Sandbox()


class SandboxedTemplate:
    """One chat template, compiled in the sandbox from its ``text``. Raises ``TemplateError`` if it does not
    compile."""

    def __init__(self, text: str) -> None:
        self._template = _environment().from_string(text)

    def render(self, messages: list[dict[str, Any]], **names: Any) -> str:
        """Render the template with ``messages`` and the variables ``names``. Returns the text. Raises what
        the template raises, and ``SecurityError`` beyond its limits."""
        before = _budget.until
        _budget.until = time.thread_time() + SECONDS + MESSAGE_SECONDS * len(messages)
        try:
            return self._template.render(messages=messages, **names)
        finally:
            _budget.until = before


@functools.lru_cache(maxsize=64)
def compiled(text: str) -> SandboxedTemplate:
    """The compiled template with this ``text``; the latest 64 are cached, for all sessions. Raises
    ``TemplateError`` if it does not compile."""
    return SandboxedTemplate(text)


# --- a process to try a template in -----------------------------------------------------------------------


def broken_limit(template: str, named: Mapping[str, str], seconds: int = CHECK_SECONDS) -> str:
    """Try a template in a process of its own. Returns, in words, the limit that it breaks; empty if it breaks
    none.

    ``named``: the special tokens that it may use, by name. ``seconds``: the processor time that the process may
    use. Errors that the template itself raises there are ignored. Blocks until the process ends, up to
    `WAIT_SECONDS`.
    """
    asked = json.dumps({"template": template, "named": dict(named), "seconds": seconds})
    try:
        child = subprocess.run(
            [sys.executable, "-I", __file__],
            input=asked,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            timeout=WAIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"it was not rendered within {WAIT_SECONDS:g} s"
    if child.returncode == -signal.SIGXCPU:
        return f"rendering it takes more than {seconds} s of processor time"
    if child.returncode != 0:
        return f"the process that tried it ended with {child.returncode}"
    return "" if child.stdout.strip() == "kept" else f"rendering it takes more than {CHECK_BYTES >> 20} MiB"


_TALKS = (
    (("system", "zq"), ("user", "zq")),
    (("user", "zq"), ("assistant", "zq"), ("user", "zq")),
    (("user", "zq" * 500), ("assistant", "<think>zq</think>zq"), ("tool", "zq"), ("assistant", "zq")),
    (("user", "zq"), ("calls", ""), ("tool", "zq"), ("assistant", "zq"), ("user", "zq")),
)
_CALL = {"id": "zqzqzqzqz", "type": "function", "function": {"name": "zq", "arguments": {"zq": "zq"}}}


def _message(role: str, text: str) -> dict[str, Any]:
    if role == "calls":
        return {"role": "assistant", "content": text, "tool_calls": [_CALL]}
    return {"role": role, "content": text} | ({"tool_call_id": _CALL["id"]} if role == "tool" else {})


def _try() -> None:
    """The main function of the process of `broken_limit`: render the template that stdin holds, within
    limits, and print "kept", or "memory" if that ran out. The kernel ends the process at the limit of time.
    """
    resource.setrlimit(resource.RLIMIT_AS, (CHECK_BYTES, CHECK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.load(sys.stdin)
    seconds = asked["seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    told = "kept"
    tool = {"type": "function", "function": {"name": "zq", "description": "zq", "parameters": {}}}
    for talk in _TALKS:
        for opened in (True, False):
            try:
                SandboxedTemplate(asked["template"]).render(
                    [_message(role, text) for role, text in talk],
                    tools=[tool] if opened else None,
                    documents=None,
                    add_generation_prompt=opened,
                    **asked["named"],
                )
            except MemoryError:
                told = "memory"
            except (Exception, RecursionError):  # a template may refuse a conversation
                continue
    print(told)


if __name__ == "__main__":
    _try()
