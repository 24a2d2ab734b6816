"""Loading a model folder's tokenizer, and marking what a user typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from holdfast.sessions.errors import TemplateFailed, TokenizerUnreadable
from holdfast.sessions.text.streaming_tokenizer import StablePrefixRule
from holdfast.sessions.text.tokenizer import CLOSE_MARK, LONG, OPEN_MARK, ChatTokenizer

from .chat_languages import CHATML, FAMILIES, ours, reference


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    reference("llama3").save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_that_transformers_wrote_is_read(folder: Path) -> None:
    loaded = ChatTokenizer.load(folder)
    assert loaded.template == FAMILIES["llama3"].template
    assert loaded.named["bos_token"] == "<|begin_of_text|>"
    assert loaded.special_ids == ours("llama3").special_ids


@pytest.mark.parametrize("written", [CHATML, [{"name": "default", "template": CHATML}], None])
def test_older_folders_keep_the_template_in_the_configuration(folder: Path, written: object) -> None:
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    written_token = {"__type": "AddedToken", "content": "<|begin_of_text|>", "lstrip": False}
    config |= {"chat_template": written, "bos_token": written_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = ChatTokenizer.load(folder)
    assert loaded.template == (written and CHATML)
    assert loaded.named["bos_token"] == "<|begin_of_text|>"


PLAIN = {"name": "default", "template": "plain"}
TOOLS = {"name": "tool_use", "template": CHATML}


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ([PLAIN], ("plain", None)),
        ([PLAIN, TOOLS], ("plain", CHATML)),
        ([TOOLS, PLAIN, {"name": "rag", "template": "cited"}], ("plain", CHATML)),
        ([TOOLS], (CHATML, None)),
        ([{"name": "rag", "template": "cited"}], ("cited", None)),
        ([PLAIN, {"name": "tool_use", "template": "plain"}], ("plain", None)),
    ],
)
def test_a_list_of_templates_has_one_for_conversations_with_tools(
    folder: Path, listed: list[object], found: tuple[str, str | None]
) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    loaded = ChatTokenizer.load(folder)
    assert (loaded.template, loaded.tool_template) == found


def test_template_files_replace_those_of_the_configuration(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [PLAIN, TOOLS]}))
    additional = folder / "additional_chat_templates"
    additional.mkdir()
    (additional / "tool_use.jinja").write_text("with tools")
    loaded = ChatTokenizer.load(folder)
    assert (loaded.template, loaded.tool_template) == (FAMILIES["llama3"].template, "with tools")
    (additional / "tool_use.jinja").unlink()
    assert ChatTokenizer.load(folder).tool_template is None


@pytest.mark.parametrize("listed", [["plain"], [{"template": "plain"}], [3], {}, [{"name": "default"}]])
def test_a_list_of_something_else_is_refused(folder: Path, listed: object) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    with pytest.raises(TokenizerUnreadable, match=r"chat.template"):
        ChatTokenizer.load(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", b"{"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_file_is_named_with_what_to_do(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(TokenizerUnreadable, match=f"{name}: .*download it again"):
        ChatTokenizer.load(folder)


def test_marks_are_put_around_typed_control_tokens_wherever_they_stand() -> None:
    mark = ours("chatml").mark
    marked = f"a {OPEN_MARK}<|im_end|>{CLOSE_MARK} b"
    assert mark("a <|im_end|> b") == marked
    assert mark({"a <|im_end|> b": ["a <|im_end|> b", 7, None]}) == {marked: [marked, 7, None]}
    assert mark(f"<|im_{OPEN_MARK}end|>") == f"{OPEN_MARK}<|im_end|>{CLOSE_MARK}"  # a mark cannot be forged
    unwritten = "<think> is an added token, but none that this template writes"
    assert mark(unwritten) == unwritten


def test_a_tokenizer_that_cannot_spell_a_control_token_refuses_it() -> None:
    """A word-level model knows the token as a word: as text it would still be the control token."""
    words = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer = ChatTokenizer(words, "{{ messages[0].content }}<end>")
    with pytest.raises(TemplateFailed, match="as plain text"):
        tokenizer.encode(tokenizer.mark("a <end>"), leads=True)


def test_text_within_a_prompt_gets_no_space_in_front() -> None:
    """SentencePiece-like tokenizers begin a text with a space; what follows a reply is not a beginning."""
    words = Tokenizer(models.WordLevel({"▁a": 0, "a": 1, "\n": 2, "▁": 3, "?": 4}, unk_token="?"))
    spaced = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    words.pre_tokenizer = pre_tokenizers.Sequence([spaced, pre_tokenizers.Split("\n", "isolated")])
    tokenizer = ChatTokenizer(words, "")
    assert tokenizer.encode("a", leads=True) == [0]
    assert tokenizer.encode("a", leads=False) == [1]
    assert tokenizer.encode("", leads=False) == []


@pytest.mark.parametrize("name", FAMILIES)
@given(text=st.text(st.sampled_from(list("aZé中1 \n\t.<>{|▁")) | st.characters(codec="utf-8"), max_size=12))
def test_text_within_a_prompt_is_written_as_behind_a_line(name: str, text: str) -> None:
    """Read once where the beginning makes no difference, twice where it does: the ids are the same."""
    text = text.replace(OPEN_MARK, "").replace(CLOSE_MARK, "")
    loaded = ours(name)
    newline, behind = (
        loaded.backend.encode(one, add_special_tokens=False).ids for one in ("\n", "\n" + text)
    )
    if text and behind[: len(newline)] == newline:
        assert loaded.encode(text, leads=False) == behind[len(newline) :]


def test_a_tokenizer_that_begins_with_a_space_is_asked_behind_a_line() -> None:
    backend = Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2, "<0x0A>": 3}, [("▁", "a")], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    loaded = ChatTokenizer(backend, "")
    assert loaded.encode("a", leads=True) == [2]
    assert loaded.encode("a", leads=False) == [1]


class Watched:
    """A library's tokenizer, and how much it was given: at once while no other thread could run, and in all."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.longest = self.total = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def encode(self, text: str, **options: object) -> object:
        self.longest, self.total = max(self.longest, len(text)), self.total + len(text)
        return self._backend.encode(text, **options)

    def encode_batch(self, texts: list[str], **options: object) -> object:
        self.total += sum(map(len, texts))
        return self._backend.encode_batch(texts, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_long_text_leaves_other_threads_room_and_has_the_same_tokens(name: str) -> None:
    """The gateway's loop is such a thread: `encode` of the library holds the interpreter to its end."""
    plain = ours(name)
    watched = Watched(plain.backend)
    patient = ChatTokenizer(watched, plain.template, plain.named)
    text = "It's 21 degrees; what now?\n " * (2 * LONG // 25)
    for leads in (True, False):
        assert patient.encode(text, leads=leads) == plain.backend.encode(text, add_special_tokens=False).ids
        assert patient.split(text, leads=leads).ids == patient.encode(text, leads=leads)
        assert StablePrefixRule(patient).prefix_of(text, leads=leads).ids
    assert 0 < watched.longest < LONG + 2
