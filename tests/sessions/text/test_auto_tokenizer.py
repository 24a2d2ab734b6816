"""A folder's tokenizer is that of transformers' `AutoTokenizer`, whatever its files leave out or say twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from holdfast.runtime.model.folder import POCKET_FOLDER
from holdfast.sessions.conversation.items import Preamble
from holdfast.sessions.conversation.tree import Script
from holdfast.sessions.errors import TokenizerUnreadable
from holdfast.sessions.text.language import Language
from holdfast.sessions.text.renderer import Renderer
from holdfast.sessions.text.tokenizer import ChatTokenizer

from .chat_languages import CHATML, CORPUS
from .published_templates import NOON, PUBLISHED, tokenizer_of, user

KINDS: dict[str, tuple[str, str | None, str | None]] = {
    "llama-2": ("mistral-7b-v0.2", "LlamaTokenizer", "llama"),
    "llama-3": ("llama-3.1", "PreTrainedTokenizerFast", "llama"),
    "llama-3 as llama": ("llama-3.1", "LlamaTokenizerFast", "llama"),
    "mistral": ("mistral-nemo", "LlamaTokenizer", "mistral"),
    "gemma": ("gemma-2", "GemmaTokenizer", "gemma2"),
    "gemma without a class": ("gemma-3", None, "gemma3_text"),
    "qwen2": ("qwen2.5", "Qwen2Tokenizer", "qwen2"),
    "qwen2 as fast": ("qwen2.5", "PreTrainedTokenizerFast", "qwen2"),
    "qwen3": ("qwen3", "Qwen2Tokenizer", "qwen3"),
    "gpt2": ("granite-3.3", "GPT2Tokenizer", "granite"),
    "gpt2 alone": ("smollm2", "GPT2Tokenizer", None),
    "cohere": ("phi-4", "CohereTokenizerFast", "llama"),
    "neox": ("phi-3.5", "GPTNeoXTokenizer", None),
    "backend": ("deepseek-v3", "TokenizersBackend", "llama"),
    "unknown class": ("exaone-3.5", "SomeTokenizer", "llama"),
    "no class": ("smollm3", None, "smollm3"),
}
"""By name: a published template, which gives the tokens, the tokenizer's class, and the model's type."""
PIECES = {"mistral-7b-v0.2", "gemma-2", "gemma-3"}
"""Their vocabulary is of SentencePiece's form; the others' is of bytes."""
TEXTS = (
    "Hello there, how are you?",
    "  two spaces, a\ttab\n\nand lines \n",
    "Привет é 中文 😀",
    "{bos}Hello {end} there{end}\nnow {end}{bos} x",
    " {end} around <image> and <extra> and<extra>so <mask><pad><unk><s></s>",
    "",
)

Json = dict[str, Any]


@cache
def pieces_of(name: str) -> Tokenizer:
    """A vocabulary of SentencePiece's form with the tokens of a published template."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *letters], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = made["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found = PUBLISHED[name]
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in (found.bos, *found.ends) if text]
    )
    return tokenizer


class Files:
    """The files of one kind. ``first``: its token for the beginning. ``end``: the one that ends a reply."""

    def __init__(self, kind: str) -> None:
        name, tokenizer_class, model_type = KINDS[kind]
        found = PUBLISHED[name]
        self.end = found.ends[0]
        self.first = found.bos or self.end
        backend = Tokenizer.from_str((pieces_of if name in PIECES else tokenizer_of)(name).to_str())
        if found.bos:
            single = f"{found.bos} $A"
            ids = [(found.bos, backend.token_to_id(found.bos))]
            backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
        self.tokenizer: Json = json.loads(backend.to_str())
        self.config: Json | None = {"chat_template": CHATML.replace("<|im_end|>", self.end), **found.named}
        if tokenizer_class is not None:
            self.config["tokenizer_class"] = tokenizer_class
        self.model: Json | None = None if model_type is None else {"model_type": model_type}
        self.others: Json = {}

    @property
    def added(self) -> list[Json]:
        return self.tokenizer["added_tokens"]

    def decoder(self, **changes: Any) -> Json:
        """What `added_tokens_decoder` has, with changes of the token that ends a reply."""
        return {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            | (changes if token["content"] == self.end else {})
            for token in self.added
        }

    def change(self, content: str, **changes: Any) -> None:
        """Change an added token of `tokenizer.json`."""
        next(token for token in self.added if token["content"] == content).update(changes)

    def write(self, folder: Path) -> Path:
        files = {"tokenizer.json": self.tokenizer, "tokenizer_config.json": self.config}
        for name, content in {**files, "config.json": self.model, **self.others}.items():
            if content is not None:
                (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return folder


def token(content: str, **flags: bool) -> Json:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": content, **plain, **flags}


def only_in_the_map(files: Files) -> None:
    files.others["special_tokens_map.json"] = {
        "bos_token": files.config.pop("bos_token", files.first),
        "eos_token": token(files.config.pop("eos_token")),
    }


def only_of_the_class(files: Files) -> None:
    files.config.pop("bos_token", None)
    files.config.pop("eos_token")


def null(files: Files) -> None:
    files.config["bos_token"] = None


def as_objects(files: Files) -> None:
    files.config["bos_token"] = {"__type": "AddedToken", **token(files.first, rstrip=True)}


def another_in_the_map(files: Files) -> None:
    files.others["special_tokens_map.json"] = {"eos_token": files.first, "pad_token": files.end}
    files.config["pad_token"] = files.first


def both_with_the_decoder(files: Files) -> None:
    another_in_the_map(files)
    files.config["added_tokens_decoder"] = files.decoder()


def stripped_in_the_decoder(files: Files) -> None:
    files.config["added_tokens_decoder"] = files.decoder(rstrip=True, lstrip=True)


def stripped_in_the_tokenizer(files: Files) -> None:
    files.config["added_tokens_decoder"] = files.decoder()
    files.change(files.end, rstrip=True)


def normalized_in_the_decoder(files: Files) -> None:
    files.config["added_tokens_decoder"] = files.decoder(normalized=True, single_word=True)


def plain_in_the_tokenizer(files: Files) -> None:
    files.change(files.end, special=False, normalized=True)


def more_in_the_decoder(files: Files) -> None:
    number = 1 + max(one["id"] for one in files.added)
    files.config["added_tokens_decoder"] = {**files.decoder(), str(number): token("<extra>", lstrip=True)}


def in_the_older_file(files: Files) -> None:
    files.others["added_tokens.json"] = {"<extra>": 1 + max(one["id"] for one in files.added)}


def additional(files: Files) -> None:
    files.config["additional_special_tokens"] = ["<extra>", files.end]


def named_by_the_model(files: Files) -> None:
    files.config["extra_special_tokens"] = {"image_token": "<image>"}
    files.config["chat_template"] += "{{ image_token }}"


def no_configuration(files: Files) -> None:
    files.others["chat_template.jinja"] = files.config["chat_template"]
    files.config = None


def begins_and_ends(files: Files) -> None:
    files.config |= {"add_bos_token": True, "add_eos_token": True}
    files.tokenizer["post_processor"] = None


def unlike_the_class(files: Files) -> None:
    files.tokenizer["normalizer"] = {"type": "Lowercase"}


def cut_and_filled(files: Files) -> None:
    whole = Tokenizer.from_str(json.dumps(files.tokenizer))
    whole.enable_truncation(3)
    whole.enable_padding(length=8, pad_token=files.end)
    files.tokenizer = json.loads(whole.to_str())


VARIANTS: tuple[Callable[[Files], None], ...] = (
    *(only_in_the_map, only_of_the_class, null, as_objects, another_in_the_map, both_with_the_decoder),
    *(stripped_in_the_decoder, stripped_in_the_tokenizer, normalized_in_the_decoder, plain_in_the_tokenizer),
    *(more_in_the_decoder, in_the_older_file, additional, named_by_the_model, no_configuration),
    *(begins_and_ends, unlike_the_class, cut_and_filled),
)


def check(folder: Path, files: Files) -> None:
    """Compare a folder's tokenizer with transformers' one."""
    ours, theirs = ChatTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.named == theirs.special_tokens_map
    assert ours.special_ids == {
        known.content: number for number, known in theirs.added_tokens_decoder.items() if known.special
    }
    for template in TEXTS:
        text = template.replace("{bos}", files.first).replace("{end}", files.end)
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.backend.encode(text, add_special_tokens=special).ids == ids, text
            assert ours.backend.decode(ids, skip_special_tokens=special) == theirs.decode(
                ids, skip_special_tokens=special
            )
    language = Language.of(ours)
    renderer = Renderer(ours, NOON, language.prefix_rule, language.report.rules)
    prompt = renderer.draft(Script(Preamble(), (user("Hello there  \n"),))).tokens().tolist()
    said = [{"role": "user", "content": "Hello there  \n"}]
    expected = theirs.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    assert prompt == expected


@pytest.mark.parametrize(
    "vary", [None, *VARIANTS], ids=lambda vary: vary.__name__ if vary else "as_published"
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_read_as_transformers_reads_it(
    kind: str, vary: Callable[[Files], None] | None, tmp_path: Path
) -> None:
    files = Files(kind)
    if vary is not None:
        vary(files)
    check(files.write(tmp_path), files)


def split(files: Files) -> str:
    files.config["split_special_tokens"] = True
    return "split_special_tokens"


def cleaned_up(files: Files) -> str:
    words = {"<unk>": 0, "Hello": 1, files.end: 2}
    files.tokenizer = json.loads(Tokenizer(models.WordLevel(words, unk_token="<unk>")).to_str())
    files.config |= {"clean_up_tokenization_spaces": True, "tokenizer_class": "PreTrainedTokenizerFast"}
    return "clean_up_tokenization_spaces"


def broken_map(files: Files) -> str:
    files.others["special_tokens_map.json"] = "{"
    return "special_tokens_map.json"


def named_by_a_number(files: Files) -> str:
    files.config["bos_token"] = 3
    return "bos_token"


def with_code_of_its_own(files: Files) -> str:
    files.config |= {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    files.model = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    return "it is code of its own, which is not run: save it"


@pytest.mark.parametrize("spoil", [split, cleaned_up, broken_map, named_by_a_number, with_code_of_its_own])
def test_what_cannot_be_read_or_computed_so_is_refused_in_a_line(
    spoil: Callable[[Files], str], tmp_path: Path
) -> None:
    files = Files("llama-3")
    named = spoil(files)
    with pytest.raises(TokenizerUnreadable) as refused:
        ChatTokenizer.load(files.write(tmp_path))
    told = refused.value.message
    assert str(tmp_path) in told and named in told and "\n" not in told


@pytest.mark.parametrize("vary", [only_of_the_class, more_in_the_decoder, begins_and_ends])
def test_a_store_knows_its_model_by_what_the_file_says(vary: Callable[[Files], None], tmp_path: Path) -> None:
    """Whatever transformers makes of it, in any version; stores have this digest from before it was asked."""
    files = Files("llama-2")
    vary(files)
    language = Language.of(ChatTokenizer.load(files.write(tmp_path)))
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert language.tokenizer.backend.to_str() != plain.to_str()
    assert language.digest() == Language.of(ChatTokenizer(plain, files.config["chat_template"])).digest()


def test_a_process_without_transformers_and_torch_reads_the_same(tmp_path: Path) -> None:
    folder = Files("llama-2").write(tmp_path)
    program = (
        "import sys; from pathlib import Path; from holdfast.sessions.text.tokenizer import ChatTokenizer\n"
        "read = ChatTokenizer.load(Path(sys.argv[1]))\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)), read.named, end='')\n"
        "print(read.backend.to_str(), end='')"
    )
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    found = AutoTokenizer.from_pretrained(folder)
    assert done.stdout == f"[] {found.special_tokens_map}{found.backend_tokenizer.to_str()}"


def test_the_pocket_models_files_say_what_transformers_reads() -> None:
    """So they are read as they are, without transformers."""
    ours, theirs = ChatTokenizer.load(POCKET_FOLDER), AutoTokenizer.from_pretrained(POCKET_FOLDER)
    assert ours.backend.to_str() == theirs.backend_tokenizer.to_str()
    assert (ours.named, ours.template) == (theirs.special_tokens_map, theirs.chat_template)
