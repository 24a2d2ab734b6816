"""The model's tokenizer and chat template, as a model folder has them; text to ids.

Loads with the tokenizers library alone: the gateway's process needs no torch. What a user typed never
becomes a control token: strings from outside are marked before the template sees them, and what is marked
is tokenized as plain text. That is what transformers'
``apply_chat_template(sanitize_control_tokens=True)`` does, id for id. Knows nothing of conversations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer, models, pre_tokenizers

from ..errors import TemplateFailed, TokenizerUnreadable

OPEN_MARK, CLOSE_MARK = "\U000f0000", "\U000f0001"
"""Put around control tokens in strings from outside (transformers' own choice of private-use characters)."""

PROBES = ("a", "A", "é", "中", "1", "<", ".")
"""Beginnings of text: a tokenizer that writes all of these the same inside a prompt does so with any."""
COMPOSED = 4
"""Bytes of text that normalization form C makes one of, or more: 7 become 2 at most."""
LONG = 8192
"""Characters of a text that must not keep other threads from running: 2 ms of tokenizing, or more."""
TEMPLATE = "chat_template.jinja"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text in tokens, ``[tokens]`` each: their ids, their words (pre-tokens), where they end in the text."""

    ids: list[int]
    words: list[int | None]
    ends: list[int]


class TokenizedPart:
    """A text in tokens, of which a few are looked at: as `TokenizedText`, without lists of them all."""

    def __init__(self, whole: Encoding, before: int = 0, shift: int = 0) -> None:
        self.ids: list[int] = whole.ids[before:]
        self._whole = whole
        self._before, self._shift = before, shift

    def follows(self, ids: list[int]) -> bool:
        """Whether these are what stands before it."""
        return list(self._whole.ids[: self._before]) == ids

    def word(self, at: int) -> int | None:
        """Of one token."""
        word: int | None = self._whole.token_to_word(at + self._before)
        return word

    def end(self, at: int) -> int:
        """Where one token ends in the text."""
        found = self._whole.token_to_chars(at + self._before)
        return 0 if found is None else int(found[1]) - self._shift


class ChatTokenizer:
    """Text to ids for one model. ``named``: what its template may call ``bos_token``, ``eos_token``….

    ``response_template``: transformers' description of how the model writes its replies, where there is one.
    """

    def __init__(
        self,
        backend: Tokenizer,
        template: str,
        named: Mapping[str, str] | None = None,
        response_template: Any = None,
    ) -> None:
        self.backend = backend
        self.template = template
        self.response_template = response_template
        self.named = dict(named or {})
        self._newline = self._parse("\n")  # what stands before text that does not lead
        self._leading = any(self._parse(word) != self._after_newline(word) for word in PROBES)
        added = backend.get_added_tokens_decoder()
        self.added = frozenset(added)
        """Ids of all tokens that stand for themselves, whatever is around them."""
        self._spelled: dict[str, list[int]] = {}
        self.specials = frozenset(token for token, known in added.items() if known.special)
        """Ids of the special tokens, which delivered text leaves out."""
        self.special_ids = {known.content: token for token, known in added.items() if known.special}
        control, probe = next(iter(self.special_ids), ""), PROBES[0]
        self._anew = self._leading and self._parse(control + probe) == [
            *self._parse(control),
            *self._parse(probe),
        ]
        controls = [
            known.content
            for known in added.values()
            if known.special or (known.content in template and not known.content.isspace())
        ]
        self._controls = re.compile(_any_of(controls))
        self._firsts = frozenset(content[0] for content in controls if content)
        marked = f"{OPEN_MARK}({_any_of(known.content for known in added.values())}){CLOSE_MARK}"
        self._marked = re.compile(f"{marked}|[{OPEN_MARK}{CLOSE_MARK}]")
        greedy = _any_of(known.content for known in added.values() if known.rstrip)
        others = _any_of(known.content for known in added.values() if not known.rstrip)
        self._control = re.compile(f"[{OPEN_MARK}{CLOSE_MARK}]|(?:{greedy})\\s*|{others}")
        self._takes_space = any(known.lstrip or known.rstrip for known in added.values())
        self.longest = _longest(backend)
        """Bytes that one token can stand for, at most; None where there may be no such bound."""

    @classmethod
    def load(cls, folder: Path) -> ChatTokenizer:
        """From ``tokenizer.json``, ``tokenizer_config.json`` and, where it is, ``chat_template.jinja``.

        Raises ``TokenizerUnreadable`` naming the file.
        """
        path = folder / "tokenizer.json"
        try:
            backend = Tokenizer.from_file(str(path))
        except Exception as fault:  # the library raises bare Exception for every cause
            raise TokenizerUnreadable(f"{path}: {fault}") from None
        backend.no_truncation()
        backend.no_padding()
        config = _config(folder / "tokenizer_config.json")
        response_template = config.get("response_template")
        return cls(backend, _template(folder, config), _named(config), response_template)

    def mark(self, value: Any) -> Any:
        """The JSON-like value with the control tokens in its strings marked as what somebody typed."""
        if isinstance(value, str):
            bare = value.replace(OPEN_MARK, "").replace(CLOSE_MARK, "")
            if not any(first in bare for first in self._firsts):
                return bare
            return self._controls.sub(f"{OPEN_MARK}\\g<0>{CLOSE_MARK}", bare)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.mark(inner) for inner in value]
        return value

    def encode(self, text: str, *, leads: bool) -> list[int]:
        """Ids of rendered text whose marked tokens stay text. ``leads``: it begins the prompt."""
        # [text, marked token, text, marked token, ..., text], with None for the token of a lone mark
        pieces = self._marked.split(text)
        ids = self._parse(pieces[0]) if leads else self._parse_inside(pieces[0])
        for at, piece in enumerate(pieces[1:], start=1):
            if piece:
                ids += self.spell(piece) if at % 2 else self._parse_inside(piece)
        return ids

    def least(self, text: str) -> int:
        """So many tokens the rendered text has at least; quick, whatever it is. 0 where nothing can be said."""
        if self.longest is None:
            return 0
        marks = text.count(OPEN_MARK) + text.count(CLOSE_MARK)
        if self._takes_space:  # a control token takes it in, however much it is
            text = "".join(text.split())
        size = len(text) if text.isascii() else len(text.encode())
        return -(-(size - marks * len(OPEN_MARK.encode())) // self.longest)

    def most_characters(self, tokens: int) -> int | None:
        """Characters that so many tokens can stand for, at most; None where there is no such bound."""
        return None if self.longest is None or self._takes_space else self.longest * tokens

    def marked(self, text: str, start: int = 0) -> Iterator[tuple[int, int, str | None]]:
        """Where marks in rendered text begin and end, with the token that they are around, if it is one."""
        for found in self._marked.finditer(text, start):
            yield found.start(), found.end(), found[1]

    def spell(self, token: str) -> list[int]:
        """Ids of an added token's text as mere text. Raises ``TemplateFailed`` where that cannot be."""
        if token not in self._spelled:
            self._spelled[token] = self._spell(token)
        return self._spelled[token]

    def cut(self, text: str, *, leads: bool) -> TokenizedPart:
        """Text without marks, to look at its words. Raises ``ValueError`` where `encode` has other ids."""
        if leads or not self._leading:
            return TokenizedPart(self._batched(text))
        newline = self._newline
        cut = TokenizedPart(self._batched("\n" + text), len(newline), 1)
        if not cut.follows(newline):
            raise ValueError("it shares a token with what stands before it")
        return cut

    def last_control(self, text: str) -> int:
        """Where the last control token or mark of rendered text ends, with the white space that it takes; 0
        where there is none."""
        end = 0
        for found in self._control.finditer(text):
            end = found.end()
        return end

    def leads(self, before: str) -> bool:
        """Whether what follows on the control token or mark that ``before`` ends with is written like the
        beginning of a prompt."""
        return self._anew and before[-1] not in (OPEN_MARK, CLOSE_MARK)

    def words(self, text: str, *, leads: bool) -> TokenizedText:
        """Rendered text without control tokens, word by word."""
        if leads or not self._leading:
            whole = self._encoded(text)
            return TokenizedText(list(whole.ids), list(whole.word_ids), [end for _, end in whole.offsets])
        newline = self._newline
        before, whole = len(newline), self._encoded("\n" + text)
        if list(whole.ids[:before]) == newline:
            ends = [end - 1 for _, end in whole.offsets[before:]]
            return TokenizedText(list(whole.ids[before:]), list(whole.word_ids[before:]), ends)
        return self.words(text, leads=True)

    def text_of(self, token: int) -> str:
        """What one token decodes to alone, special ones too."""
        text: str = self.backend.decode([token], skip_special_tokens=False)
        return text

    def spellings(self, word: str) -> set[tuple[int, ...]]:
        """How the word is tokenized at the beginning of text and after a space; never empty tuples."""
        return {tuple(ids) for ids in (self._parse(word), self._parse_inside(" " + word)) if ids}

    def _encoded(self, text: str) -> Encoding:
        """Of what the library can tokenize, only a batch leaves the interpreter to other threads meanwhile."""
        if len(text) < LONG:
            return self.backend.encode(text, add_special_tokens=False)
        return self._batched(text)

    def _batched(self, text: str) -> Encoding:
        (whole,) = self.backend.encode_batch([text], add_special_tokens=False)
        return whole

    def _parse(self, text: str) -> list[int]:
        return list(self._encoded(text).ids)

    def _parse_inside(self, text: str) -> list[int]:
        """Ids of text from within a prompt: tokenizers that prefix a space do so only at the beginning."""
        inside = self._after_newline(text) if text and self._leading else None
        return self._parse(text) if inside is None else inside

    def _after_newline(self, text: str) -> list[int] | None:
        """Ids of text that follows on a line's end; None where it shares a token with that."""
        newline = self._newline
        ids = self._parse("\n" + text)
        return ids[len(newline) :] if ids[: len(newline)] == newline else None

    def _spell(self, token: str) -> list[int]:
        newline = self._plain("\n")
        ids = self._plain("\n" + token)
        ids = ids[len(newline) :] if ids[: len(newline)] == newline else self._plain(token)
        if self.backend.token_to_id(token) in ids:
            raise TemplateFailed(f"The tokenizer cannot write {token!r} as plain text")
        return ids

    def _plain(self, text: str) -> list[int]:
        backend = self.backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]


def _any_of(tokens: Iterable[str]) -> str:
    """An expression for any of these, the longest that fits. What several begin with is looked at once, so that
    text full of such beginnings takes no longer where there are hundreds of them."""
    tree: dict[str, Any] = {}
    for token in tokens:
        node = tree
        for character in token:
            node = node.setdefault(character, {})
        if token:
            node[""] = {}
    return _branches(tree) or "(?!)"


def _branches(tree: dict[str, Any]) -> str:
    lines = []
    for character, below in tree.items():
        line = re.escape(character)
        while len(below) == 1 and "" not in below:  # no recursion for each character
            ((character, below),) = below.items()
            line += re.escape(character)
        if character:
            lines.append(line + (_branches(below) if set(below) != {""} else ""))
    if not lines:
        return ""
    if "" in tree:
        return f"(?:{'|'.join(lines)})?"
    return lines[0] if len(lines) == 1 else f"(?:{'|'.join(lines)})"


def _longest(backend: Tokenizer) -> int | None:
    """Where every byte of a text is in a token, and none in two: bytes of the longest token."""
    model = backend.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    splits, rewrites = _parts_of(backend.pre_tokenizer), _parts_of(backend.normalizer)
    if not splits <= _SPLITS or not rewrites <= _REWRITES:
        return None
    bytes_ = "ByteLevel" in splits
    letters = pre_tokenizers.ByteLevel.alphabet() if bytes_ else [f"<0x{byte:02X}>" for byte in range(256)]
    if not all(letter in vocabulary for letter in letters) or not (bytes_ or model.byte_fallback):
        return None
    most = max(len(token) if bytes_ else len(token.encode()) for token in vocabulary)
    added = (len(known.content.encode()) for known in backend.get_added_tokens_decoder().values())
    return max(most, *added, 1) * (COMPOSED if "NFC" in rewrites else 1)


_SPLITS = {
    "Sequence",
    "Split",
    "ByteLevel",
    "Digits",
    "Metaspace",
    "Isolated",
    "MergedWithNext",
    "Contiguous",
}
_SPLITS |= {"MergedWithPrevious", "Regex", "String"}
_REWRITES = {"Sequence", "Prepend", "Replace", "String", "NFC"}


def _parts_of(step: Any) -> set[str]:
    """Types and behaviours in a pre-tokenizer's or normalizer's description."""
    if step is None:
        return set()
    found: set[str] = set()
    level: list[Any] = [json.loads(step.__getstate__())]
    while level:
        node = level.pop()
        if isinstance(node, dict):
            found |= {str(node[name]) for name in ("type", "behavior") if name in node}
            level += [value for name, value in node.items() if isinstance(value, list)]
            if node.get("type") == "Replace" and len(str(node["content"]).encode()) < len(_pattern(node)):
                found.add("shortens")
        elif isinstance(node, list):
            level += node
    return found


def _pattern(node: dict[str, Any]) -> bytes:
    """What a normalizer replaces; longer than all things where that is an expression."""
    literal = node["pattern"].get("String")
    return bytes(1 << 16) if literal is None else str(literal).encode()


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as fault:
        raise TokenizerUnreadable(f"{path}: {fault}") from None
    if not isinstance(config, dict):
        raise TokenizerUnreadable(f"{path}: not a JSON object")
    return config


def template_file(folder: Path) -> Path:
    """The file of a model folder that holds its chat template."""
    alone = folder / TEMPLATE
    return alone if alone.exists() else folder / "tokenizer_config.json"


def _template(folder: Path, config: dict[str, Any]) -> str:
    path = folder / TEMPLATE
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        found = config.get("chat_template")
    except (OSError, ValueError) as fault:
        raise TokenizerUnreadable(f"{path}: {fault}") from None
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("tool_use") or named.get("default")
    if not isinstance(found, str):
        raise TokenizerUnreadable(f"{folder / 'tokenizer_config.json'}: no chat template, nor {path.name}")
    return found


def _named(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that have a name; older files write them as objects."""
    found = {name: config.get(name) for name in _NAMED}
    flat = {name: token["content"] if isinstance(token, dict) else token for name, token in found.items()}
    return {name: token for name, token in flat.items() if isinstance(token, str)}
