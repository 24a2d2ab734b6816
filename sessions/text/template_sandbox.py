"""Runs chat templates, which are code from outside: the environment of transformers' own, with bounds.

Nothing is computed while a template is compiled. A value, and the whole output, has at most `CHARACTERS`; a
loop ends when a rendering has used its seconds of processor time. These bounds are checked by the operations
that make large values and by loops; what else takes long or much, as a filter over a text of many megabytes,
a thread cannot be stopped in. So a template is tried in a process of its own first (`trial`), under limits of
memory and time that the kernel keeps. Imports nothing but jinja2: that process has to start fast.
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
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

CHARACTERS = 1 << 26
"""The most that one value, or the output, may have: more than any context holds."""
NUMBER = 1_000_000
"""The largest width, count or size that a filter or a method of a string may be given."""
SECONDS = 2.0
"""Of processor time for a rendering, and `MESSAGE_SECONDS` more for each message."""
MESSAGE_SECONDS = 0.001
TICKS = 16
"""Iterations of loops between two looks at the clock."""

CHECK_BYTES = 1 << 30
CHECK_SECONDS = 10
"""Of processor time; `WAIT_SECONDS` by the clock, on a machine that is busy."""
WAIT_SECONDS = 120.0

_WIDE = re.compile(r"[0-9]{7}|%[^a-zA-Z%]*\*")
"""A width or a precision in a format string that is too large, or is given as an argument."""
_SIZED = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "wordwrap", "truncate"}
)


class _Budget(threading.local):
    """The processor time that the rendering on this thread may use."""

    until = float("inf")
    ticks = 0

    def tick(self) -> None:
        """One more iteration."""
        self.ticks += 1
        if self.ticks % TICKS == 0 and time.thread_time() > self.until:
            raise SecurityError("it takes more processor time than a rendering may")


_budget = _Budget()


def _check(characters: int) -> None:
    if characters > CHARACTERS:
        raise SecurityError(f"it makes a value of {characters} characters, more than {CHARACTERS}")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _joined(pieces: Iterable[Any]) -> str:
    """The pieces in one, if they are not too many."""
    found: list[str] = []
    total = 0
    for piece in pieces:
        _budget.tick()
        found.append(str(piece))
        total += len(found[-1])
        _check(total)
    return "".join(found)


def _ticking(values: Iterable[Any]) -> Iterator[Any]:
    """What a loop goes through."""
    for value in values:
        _budget.tick()
        yield value


def _check_sizes(arguments: Iterable[Any]) -> None:
    for value in arguments:
        if isinstance(value, int) and abs(value) > NUMBER:
            raise SecurityError(f"it asks for {value}, more than {NUMBER}")


def _sized(real: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments say how large its result is."""

    @functools.wraps(real)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_sizes([*args, *kwargs.values()])
        return real(*args, **kwargs)

    return checked


def _check_replacement(text: Any, old: Any, new: Any) -> None:
    if all(isinstance(one, str) for one in (text, old, new)):
        times = text.count(old) if old else len(text) + 1
        _check(len(text) + times * max(0, len(new) - len(old)))


class _Generation(Extension):
    """The tag around what a model said, which training looks for: here it is a block and nothing else."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """Its body."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Unfolded(CodeGenerator):
    """Leaves what is constant in a template to its rendering."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible()
        return super()._output_child_to_const(node, frame, finalize)


class _Dict:
    """``dict`` without its class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As of a dict."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """One whose names begin with no underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        found = dict(*rest, **kwargs)
        for name in found:
            _Namespace._check_name(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check_name(name)  # an attribute of itself is one of the template's
        super().__setitem__(name, value)

    @staticmethod
    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no names that begin with an underscore, as {name!r}")


class Sandbox(ImmutableSandboxedEnvironment):
    """What chat templates are rendered in."""

    code_generator_class = _Unfolded
    intercepted_binops = frozenset({"*", "+", "%", "**"})
    concat = staticmethod(_joined)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols]
        )
        for name in _SIZED & self.filters.keys():
            self.filters[name] = _sized(self.filters[name])
        replace, formatted, join = (self.filters[name] for name in ("replace", "format", "join"))
        self.filters["replace"] = _before(replace, lambda args: _check_replacement(*args[1:4]))
        self.filters["format"] = _before(formatted, lambda args: _check_format(args[0]))
        self.filters["join"] = _before(join, lambda args: _check_join(args[1], args[2:3]))
        self.filters["tojson"] = _tojson
        self.filters |= {"_ticking": _ticking, "_joined": _joined}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The tree, with loops that are counted and concatenations that are measured."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_ticking", [], [], None, None, lineno=loop.lineno)
        _measure(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The operation, where its result is not too large."""
        if operator == "+":
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
        """Call what a template calls; a method of a string where its result is not too large."""
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


def _before(real: Callable[..., Any], check: Callable[[tuple[Any, ...]], None]) -> Callable[..., Any]:
    @functools.wraps(real)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(args)
        return real(*args, **kwargs)

    return checked


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
    """Let each ``a ~ b`` of the tree be joined by a filter that measures."""
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
    """JSON whose characters are not escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def _environment() -> Environment:
    return Sandbox()


class SandboxedTemplate:
    """One chat template. Raises ``TemplateError`` where it does not compile."""

    def __init__(self, text: str) -> None:
        self._template = _environment().from_string(text)

    def render(self, messages: list[dict[str, Any]], **names: Any) -> str:
        """The text. Raises whatever a template raises, and ``SecurityError`` beyond its bounds."""
        before = _budget.until
        _budget.until = time.thread_time() + SECONDS + MESSAGE_SECONDS * len(messages)
        try:
            return self._template.render(messages=messages, **names)
        finally:
            _budget.until = before


@functools.lru_cache(maxsize=64)
def compiled(text: str) -> SandboxedTemplate:
    """A template, compiled once for all sessions. Raises ``TemplateError``."""
    return SandboxedTemplate(text)


# --- a process to try a template in -----------------------------------------------------------------------


class SandboxCheck:
    """A template that is tried in a process of its own, from now on; what it raises is no matter here, but
    what it takes."""

    def __init__(self, template: str, named: Mapping[str, str], seconds: int = CHECK_SECONDS) -> None:
        self._asked = json.dumps({"template": template, "named": dict(named), "seconds": seconds})
        self._seconds = seconds
        self._child = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )

    def violation(self) -> str:
        """Which limit it broke, in words; empty where it kept them. Blocks until that is known."""
        with self._child as child:
            try:
                told, _ = child.communicate(self._asked, timeout=WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                return f"it was not rendered within {WAIT_SECONDS:g} s"
            except BaseException:
                child.kill()
                raise
        if child.returncode == -signal.SIGXCPU:
            return f"rendering it takes more than {self._seconds} s of processor time"
        if child.returncode != 0:
            return f"the process that tried it ended with {child.returncode}"
        return "" if told.strip() == "kept" else f"rendering it takes more than {CHECK_BYTES >> 20} MiB"


_TALKS = (
    (("system", "zq"), ("user", "zq")),
    (("user", "zq"), ("assistant", "zq"), ("user", "zq")),
    (("user", "zq" * 500), ("assistant", "<think>zq</think>zq"), ("tool", "zq"), ("assistant", "zq")),
)


def _try() -> None:
    """Compile and render what stdin has, within limits."""
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
                    [{"role": role, "content": text} for role, text in talk],
                    tools=[tool] if opened else None,
                    documents=None,
                    add_generation_prompt=opened,
                    **asked["named"],
                )
            except MemoryError:
                told = "memory"
            except (Exception, RecursionError):  # it refuses this talk: so it may
                continue
    print(told)


if __name__ == "__main__":
    _try()
