"""``holdfast serve`` as an operator meets it: what it tells, its exit code, a line where it cannot start."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.gateway.cli.main import app
from holdfast.runtime.model.folder import find_model

from .wires import address_of, cause_in, get, started_with, wire

pytestmark = pytest.mark.anyio
SMALL = ("--kv-bytes", "16MiB", "--max-context", "2048")


@asynccontextmanager
async def command(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """``holdfast`` with these words; killed at the end if it is still there."""
    program = "from holdfast.gateway.cli.main import main; main()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def refused(*words: str) -> str:
    """The line on stderr that says why a command does not start."""
    async with command(*words) as process:
        out, err = await process.communicate()
        assert process.returncode == 2 and not out
        return cause_in(err.decode())


async def test_an_interrupt_closes_sockets_with_1012_and_exits_0() -> None:
    async with command("serve", "pocket", "--port", "0", *SMALL) as process:
        url = await address_of(process)
        async with wire(url) as connection:
            assert (await connection.say("My name is Marisol."))["status"] == "completed"
            process.send_signal(signal.SIGINT)
            await connection.socket.wait_closed()
            assert connection.socket.close_code == 1012
        assert await process.wait() == 0


async def test_sigterm_lets_a_reply_end_closes_sockets_with_1012_and_exits_0() -> None:
    async with command("serve", "pocket", "--port", "0", *SMALL) as process:
        url = await address_of(process)
        async with wire(url) as connection:
            part = {"type": "input_text", "text": "Tell me the story of the fox."}
            item = {"type": "message", "role": "user", "content": [part]}
            await connection.send({"type": "conversation.item.create", "item": item})
            await connection.send({"type": "response.create"})
            await connection.until("response.output_text.delta")
            process.send_signal(signal.SIGTERM)
            done = (await connection.until("response.done"))[-1]["response"]
            assert done["status"] == "completed"
            await connection.socket.wait_closed()
            assert connection.socket.close_code == 1012
        assert await process.wait() == 0


async def test_no_engine_outlives_its_killed_server() -> None:
    async with command("serve", "pocket", "--port", "0", *SMALL) as process:
        await address_of(process)
        children = children_of(process.pid)
        assert children
        watching = [os.pidfd_open(int(child)) for child in children]
        process.kill()
        for pidfd in watching:
            ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(pidfd, ended.set)
            await ended.wait()
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)


async def test_a_key_guards_the_server() -> None:
    async with command("serve", "pocket", "--port", "0", "--api-key", "s3cret", *SMALL) as process:
        url = await address_of(process)
        assert (await get(url, "/v1/models"))[0] == 401
        assert (await get(url, "/v1/models", Authorization="Bearer s3cret"))[0] == 200
        assert (await get(url, "/ready"))[0] == 200
        headers = {"Authorization": "Bearer s3cret"}
        async with wire(url, additional_headers=headers) as connection:
            assert (await connection.say("My name is Marisol."))["status"] == "completed"


@pytest.fixture
def small_disk(tmpfs: Callable[[str], Path]) -> Path:
    return tmpfs("32m")


async def test_a_disk_too_full_for_turns_is_reported_at_once(small_disk: Path) -> None:
    async with command("serve", "pocket", "--port", "0", "--store", str(small_disk / "s"), *SMALL) as process:
        lines = await started_with(process)
        assert str(small_disk) in lines[-3] and "in reserve; new turns are refused" in lines[-2], lines


async def test_a_taken_port_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = await refused("serve", "pocket", "--port", str(port))
    assert str(port) in line and "taken" in line


def missing(folder: Path) -> str:
    shutil.rmtree(folder)
    return "no such folder"


def broken_config(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return "config.json"


def other_architecture(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    return "MambaForCausalLM"


def wrong_shape(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 1234}))
    return "model.safetensors"


def broken_header(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    return "model.safetensors"


def no_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "model.safetensors"


def no_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    return "tokenizer.json"


def hostile_template(folder: Path) -> str:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ 'A' * 3000000000 }}")
    return "chat_template.jinja: The chat template refused the conversation: it makes a value of 3000000000"


def hungry_template(folder: Path) -> str:
    lists = "{% set a = ('a' * 60000000)|list %}{% set b = a|list %}{% set c = b|list %}"
    (folder / "chat_template.jinja").write_text(lists)
    return "chat_template.jinja: The chat template was refused: rendering it takes more than 1024 MiB"


@pytest.mark.parametrize("files", [(), ("config.json",)], ids=["empty", "no weights"])
def test_a_folder_without_a_model_leaves_no_store(
    files: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, store = tmp_path / "model", tmp_path / "store"
    folder.mkdir()
    for name in files:
        shutil.copy(find_model("pocket") / name, folder)
    words = ["serve", str(folder), "--port", "0", "--store", str(store)]
    assert app(words, standalone_mode=False) == 2
    assert f"holdfast: {folder}: not a model folder: it has no " in cause_in(capfd.readouterr().err)
    assert not store.exists()


@pytest.mark.parametrize(
    "spoil",
    [
        *(missing, broken_config, other_architecture, wrong_shape, broken_header, no_weights, no_tokenizer),
        *(hostile_template, hungry_template),
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_a_model_that_cannot_be_served_is_named_in_a_line(
    spoil: Callable[[Path], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the command, in this process: the engine's is enough to start for each."""
    folder = tmp_path / "model"
    shutil.copytree(find_model("pocket"), folder)
    named = spoil(folder)
    assert app(["serve", str(folder), "--port", "0"], standalone_mode=False) == 2
    out, err = capfd.readouterr()
    line = cause_in(err)
    assert not out and named in line and str(tmp_path) in line


async def test_a_pool_too_small_for_the_context_is_reported() -> None:
    line = await refused("serve", "pocket", "--port", "0", "--kv-bytes", "1MiB", "--max-context", "2048")
    assert "2048" in line
