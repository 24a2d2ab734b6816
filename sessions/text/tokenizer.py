"""The model's tokenizer and chat template, as a model folder has them; rendered text to token ids.

Uses the tokenizers library alone: the gateway's process needs no torch. A user's text never becomes a control
token: control tokens in text from outside are marked before the template sees them, and marked ones are
tokenized as plain text. transformers' ``apply_chat_template(sanitize_control_tokens=True)`` gives the same ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Encoding, Tokenizer, models, pre_tokenizers

from ...runtime.errors import ModelUnreadable
from ...runtime.model.files import GGUFFiles, ModelFiles, files_of
from ...runtime.model.folder import POCKET_FOLDER
from ..errors import TemplateFailed, TokenizerUnreadable
from .auto_tokenizer import ReadRefused, read_tokenizer
from .detokenizer import TokenTexts

OPEN_MARK, CLOSE_MARK = "\U000f0000", "\U000f0001"
"""Stand around control tokens in text from outside (transformers' choice of private-use characters)."""

PROBES = ("a", "A", "é", "中", "1", "<", ".")
"""First characters of text: a tokenizer that has the same ids for all of these at the beginning of a prompt and
inside it has the same for all text."""
COMPOSED = 4
"""Normalization form C may shorten text, but by less than this factor: 7 bytes become 2 in the worst case."""
LONG = 8192
"""Longer texts, in characters, are tokenized as a batch, which leaves the interpreter to other threads; this
many take 2 ms."""
TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
LEGACY = ("special_tokens_map.json", "added_tokens.json")
TEMPLATE, TOOL_USE = "chat_template.jinja", "tool_use"
ANEW = "if the file is damaged or missing, download it again from where the model is from"
"""What an operator can do about a file that cannot be read."""


class TokenizedText:
    """A text's token ids, ``[tokens]``. For each token it also knows its word (pre-token) and where it ends in
    the text.

    ``whole``: the encoding, which may begin with something else: its first ``before`` tokens and ``shift``
    characters are not part of the text.
    """

    def __init__(self, whole: Encoding, before: int = 0, shift: int = 0) -> None:
        self.ids: list[int] = whole.ids[before:]
        self._whole = whole
        self._before, self._shift = before, shift

    def word(self, at: int) -> int | None:
        """The number of the word that token ``at`` belongs to; None if it is in no word."""
        word: int | None = self._whole.token_to_word(at + self._before)
        return word

    def end(self, at: int) -> int:
        """The index in the text of the character behind token ``at``; 0 for a token without characters."""
        found = self._whole.token_to_chars(at + self._before)
        return 0 if found is None else int(found[1]) - self._shift


class ChatTokenizer:
    """Makes token ids of rendered text for one model. ``backend``: the tokenizer. ``template``: the chat
    template; None if the model has none.

    ``named``: the special tokens that its template may use as ``bos_token``, ``eos_token``….
    ``response_template``: transformers' description of how the model writes replies, if the folder has one.
    ``tool_template``: the chat template for conversations with tools, if the model has another one for them.
    """

    def __init__(
        self,
        backend: Tokenizer,
        template: str | None,
        named: Mapping[str, str] | None = None,
        response_template: Any = None,
        tool_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.texts = TokenTexts(backend)
        self.template = template
        self.tool_template = tool_template
        self.response_template = response_template
        self.named = dict(named or {})
        self._files: ModelFiles | None = None
        self._newline: list[int] = self._encoded("\n").ids  # stands before text that does not lead
        self._leading = any(self._differs_inside(word) for word in PROBES)
        added = backend.get_added_tokens_decoder()
        self.added: dict[int, AddedToken] = added
        """The added tokens by id: they are matched as a whole, before any other text is tokenized."""
        self.special_ids = {known.content: token for token, known in added.items() if known.special}
        """Ids of the special tokens, which decoded replies leave out, by their text."""
        self._spelled: dict[str, list[int]] = {}
        control = next(iter(self.special_ids), "")
        both = [token for text in (control, PROBES[0]) for token in self._encoded(text).ids]
        self._anew = self._leading and self._encoded(control + PROBES[0]).ids == both
        controls = [
            known.content
            for known in added.values()
            if known.special or (known.content in "".join(self.templates) and not known.content.isspace())
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
        """Bytes of text that one token can stand for, at most; None without a bound."""
        whole = backend.encode(PROBES[0], add_special_tokens=True)
        own = len(self._encoded(PROBES[0]).ids)
        first = next((at for at, added in enumerate(whole.special_tokens_mask) if not added), 0)
        self.around = whole.ids[:first], whole.ids[first + own :]
        """Ids of the tokens that the tokenizer puts before and behind a text by itself."""

    @classmethod
    def load(cls, folder: Path) -> ChatTokenizer:
        """Read the model's tokenizer and templates: those of a folder as transformers' ``AutoTokenizer`` does,
        those of a GGUF file or of the pocket model as they are. Raises ``TokenizerUnreadable`` naming the file,
        or the folder.
        """
        files = files_of(folder)
        plain = isinstance(files, GGUFFiles) or folder == POCKET_FOLDER
        if plain:
            found = _plain(files)
        else:
            try:
                found = read_tokenizer(folder)
            except (ReadRefused, OSError) as fault:
                _plain(files)  # names a file that is broken
                raise TokenizerUnreadable(f"{folder}: the tokenizer cannot be read: {fault}") from None
        backend = _unbounded(found["tokenizer"])
        template, tool_template = _templates(found["chat_template"], files.where(CONFIG))
        made = cls(backend, template, found["named"], found["response_template"], tool_template)
        made._files = None if plain else files
        return made

    def identity(self) -> str:
        """A text by which the token ids of stored sessions are known as those of this tokenizer: what
        ``tokenizer.json`` says by itself, so that it is the same for each version of transformers; without the
        file, the tokenizer."""
        text = None if self._files is None else _text_in(self._files, TOKENIZER)
        return (self.backend if text is None else _unbounded(text)).to_str()

    @property
    def templates(self) -> tuple[str, ...]:
        """The chat templates; that for tools comes first."""
        return tuple(text for text in (self.tool_template, self.template) if text is not None)

    def mark(self, value: Any, but: Container[str] = ()) -> Any:
        """A copy of the JSON-like ``value`` with marks around the control tokens in its strings and keys,
        except for those in ``but``. Marks that were there are removed first."""
        if isinstance(value, str):
            bare = value.replace(OPEN_MARK, "").replace(CLOSE_MARK, "")
            if not any(first in bare for first in self._firsts):
                return bare
            return self._controls.sub(
                lambda found: found[0] if found[0] in but else f"{OPEN_MARK}{found[0]}{CLOSE_MARK}", bare
            )
        if isinstance(value, dict):
            return {self.mark(key, but): self.mark(inner, but) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.mark(inner, but) for inner in value]
        return value

    def encode(self, text: str, *, leads: bool) -> list[int]:
        """The ids of rendered text, in which marked control tokens are spelled as plain text. ``leads``: the
        text begins the prompt."""
        ids: list[int] = []
        # [text, marked token, text, marked token, ..., text], with None for the token of a lone mark
        for at, piece in enumerate(self._marked.split(text)):
            if piece:
                ids += self.spell(piece) if at % 2 else self.split(piece, leads=leads and not at).ids
        return ids

    def split(self, text: str, *, leads: bool) -> TokenizedText:
        """Tokenize text without marks. The result has the ids and the word (pre-token) of each. ``leads``: the
        text begins the prompt.

        Some tokenizers put a space before text only at its beginning. So text from inside a prompt is tokenized
        after a newline, unless it shares a token with that.
        """
        inside = None if leads or not self._leading else self._after_newline(text)
        return TokenizedText(self._encoded(text)) if inside is None else inside

    def least(self, text: str) -> int:
        """A lower bound of the number of tokens of rendered text, found without tokenizing it. 0 if no bound is
        known, as one token may stand for any text."""
        if self.longest is None:
            return 0
        marks = text.count(OPEN_MARK) + text.count(CLOSE_MARK)
        if self._takes_space:  # a control token may take in any amount of it
            text = "".join(text.split())
        size = len(text) if text.isascii() else len(text.encode())
        return -(-(size - marks * len(OPEN_MARK.encode())) // self.longest)

    def most_characters(self, tokens: int) -> int | None:
        """The most characters that ``tokens`` tokens can stand for; None if a token may stand for any
        number."""
        return None if self.longest is None or self._takes_space else self.longest * tokens

    def marked(self, text: str, start: int = 0) -> Iterator[tuple[int, int, str | None]]:
        """For each mark in rendered text from ``start`` on: its begin, its end, and the token inside; None for
        a mark without a token."""
        for found in self._marked.finditer(text, start):
            yield found.start(), found.end(), found[1]

    def spell(self, token: str) -> list[int]:
        """The ids that spell the text of an added token as plain text. Raises ``TemplateFailed`` if there are
        none."""
        if token not in self._spelled:
            newline = self._plain("\n")
            ids = self._plain("\n" + token)
            ids = ids[len(newline) :] if ids[: len(newline)] == newline else self._plain(token)
            if self.backend.token_to_id(token) in ids:
                raise TemplateFailed(f"The tokenizer cannot write {token!r} as plain text")
            self._spelled[token] = ids
        return self._spelled[token]

    def last_control(self, text: str) -> int:
        """The index behind the last control token or mark in rendered text, and behind the white space that
        belongs to the token; 0 if the text holds neither."""
        return max((found.end() for found in self._control.finditer(text)), default=0)

    def specials_in(self, text: str) -> list[str]:
        """The special tokens in rendered text, in order."""
        return [known for known in self._controls.findall(text) if known in self.special_ids]

    def leads(self, before: str) -> bool:
        """Whether text after ``before``, which ends with a control token or mark, is tokenized like the
        beginning of a prompt."""
        return self._anew and before[-1] not in (OPEN_MARK, CLOSE_MARK)

    def text_of(self, token: int) -> str:
        """The text that one token decodes to alone. A special token gives its own text."""
        text: str = self.backend.decode([token], skip_special_tokens=False)
        return text

    def spellings(self, word: str) -> set[tuple[int, ...]]:
        """The ids of a word in both ways that it may be tokenized: at the beginning of text, and after a
        space."""
        found = self.split(word, leads=True).ids, self.split(" " + word, leads=False).ids
        return {tuple(ids) for ids in found if ids}

    def _encoded(self, text: str) -> Encoding:
        if len(text) < LONG:
            return self.backend.encode(text, add_special_tokens=False)
        (whole,) = self.backend.encode_batch([text], add_special_tokens=False)
        return whole

    def _after_newline(self, text: str) -> TokenizedText | None:
        """The text as it is tokenized after a newline; None if the newline and the text share a token."""
        whole, before = self._encoded("\n" + text), len(self._newline)
        return TokenizedText(whole, before, 1) if whole.ids[:before] == self._newline else None

    def _differs_inside(self, word: str) -> bool:
        inside = self._after_newline(word)
        return inside is None or inside.ids != self._encoded(word).ids

    def _plain(self, text: str) -> list[int]:
        """The ids of text in which added tokens are not recognised."""
        backend = self.backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]


def _any_of(tokens: Iterable[str]) -> str:
    """A regular expression for any of these tokens, the longest that fits.

    Common beginnings are matched once, so hundreds of tokens cost no more time than a few.
    """
    tree: dict[str, Any] = {}
    for token in tokens:
        node = tree
        for character in token:
            node = node.setdefault(character, {})
        if token:
            node[""] = {}
    return _branches(tree) or "(?!)"


def _branches(tree: dict[str, Any]) -> str:
    """The regular expression that matches the tokens in ``tree``: a dictionary from a character to the
    dictionary of what may follow it, in which "" marks the end of a token."""
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
    """The most bytes of text that one token stands for.

    None unless every byte of a text is in exactly one token, as in byte-level BPE.
    """
    model = backend.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    steps = backend.pre_tokenizer, backend.normalizer
    splits, rewrites = (_parts_of(step and json.loads(step.__getstate__())) for step in steps)
    if not splits <= _SPLITS or not rewrites <= _REWRITES:
        return None
    bytes_ = "ByteLevel" in splits
    letters = pre_tokenizers.ByteLevel.alphabet() if bytes_ else [f"<0x{byte:02X}>" for byte in range(256)]
    if not all(letter in vocabulary for letter in letters) or not (bytes_ or model.byte_fallback):
        return None
    most = max(len(token) if bytes_ else len(token.encode()) for token in vocabulary)
    added = (len(known.content.encode()) for known in backend.get_added_tokens_decoder().values())
    return max(most, *added, 1) * (COMPOSED if "NFC" in rewrites else 1)


_SPLITS = {"Sequence", "Split", "ByteLevel", "Digits", "Metaspace", "Isolated", "MergedWithNext"}
_SPLITS |= {"Contiguous", "MergedWithPrevious", "Regex", "String"}
"""Pre-tokenizers, with their behaviours, that drop no text."""
_REWRITES = {"Sequence", "Prepend", "Replace", "String", "NFC"}
"""Normalizers that drop no text, but for a `Replace` that shortens."""


def _parts_of(node: Any) -> set[str]:
    """The types and behaviours in the description of a pre-tokenizer or normalizer.

    Also ``shortens`` for a `Replace` that makes text shorter.
    """
    if isinstance(node, list):
        return set().union(*map(_parts_of, node))
    if not isinstance(node, dict):
        return set()
    found = {str(node[name]) for name in ("type", "behavior") if name in node}
    if node.get("type") == "Replace" and len(str(node["content"]).encode()) < len(_pattern(node)):
        found.add("shortens")
    return found.union(*(_parts_of(value) for value in node.values() if isinstance(value, list)))


def _pattern(node: dict[str, Any]) -> bytes:
    """The text that a `Replace` replaces; 64 KiB for a regular expression, which may match any length."""
    literal = node["pattern"].get("String")
    return bytes(1 << 16) if literal is None else str(literal).encode()


def _unbounded(text: str) -> Tokenizer:
    """The tokenizer that ``text`` describes; it cuts and fills no text."""
    backend = Tokenizer.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _plain(files: ModelFiles) -> dict[str, Any]:
    """What `read_tokenizer` returns, of files that are read as they are. Raises ``TokenizerUnreadable`` naming
    a broken file, of all that describe a tokenizer."""
    text = _text_in(files, TOKENIZER)
    try:
        if text is None:
            raise FileNotFoundError(f"no {TOKENIZER}")
        Tokenizer.from_str(text)
    except Exception as fault:  # the library raises bare Exception for every cause
        raise TokenizerUnreadable(f"{files.where(TOKENIZER)}: {fault}; {ANEW}") from None
    for name in LEGACY:
        _object_in(files, name)
    config = _object_in(files, CONFIG)
    template = _text_in(files, TEMPLATE) or config.get("chat_template")
    _templates(template, files.where(CONFIG))
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    response = config.get("response_template")
    return {"tokenizer": text, "named": named, "chat_template": template, "response_template": response}


def _object_in(files: ModelFiles, name: str) -> dict[str, Any]:
    """The JSON object in the file; empty if there is no file. Raises ``TokenizerUnreadable``."""
    text, path = _text_in(files, name), files.where(name)
    try:
        found = {} if text is None else json.loads(text)
    except ValueError as fault:
        raise TokenizerUnreadable(f"{path}: {fault}; {ANEW}") from None
    if not isinstance(found, dict):
        raise TokenizerUnreadable(f"{path}: not a JSON object; {ANEW}")
    return found


def template_file(folder: Path) -> Path:
    """The file in a model's folder that holds its chat template, to name it in an error."""
    alone = folder / TEMPLATE
    return alone if alone.exists() else files_of(folder).where(CONFIG)


def _templates(found: Any, path: Path) -> tuple[str | None, str | None]:
    """The model's chat template; and the one for conversations with tools, None if there is no other. Both are
    None for a model without templates. ``found``: a text, texts by name, a list of named texts, or None.
    Raises ``TokenizerUnreadable`` naming ``path`` for anything else."""
    if found is None:
        return None, None
    try:
        listed = {entry["name"]: entry["template"] for entry in found} if isinstance(found, list) else found
        named: dict[str, str] = msgspec.convert(
            {"default": found} if isinstance(found, str) else listed, dict[str, str]
        )
        tool_template = named.pop(TOOL_USE, None)
        template = named.get("default") or (next(iter(named.values())) if len(named) == 1 else tool_template)
        if template is None:
            raise TypeError("none of them is the default")
    except (TypeError, KeyError, msgspec.ValidationError):
        told = "chat_template is neither a text nor texts by name, with a default"
        raise TokenizerUnreadable(f"{path}: {told}") from None
    return template, None if tool_template == template else tool_template


def _text_in(files: ModelFiles, name: str) -> str | None:
    """The file's text; None if there is no file. Raises ``TokenizerUnreadable``."""
    try:
        content = files.content(name)
        return None if content is None else content.decode()
    except ModelUnreadable as fault:
        raise TokenizerUnreadable(fault.message) from None
    except (OSError, ValueError) as fault:
        raise TokenizerUnreadable(f"{files.where(name)}: {fault}; {ANEW}") from None
