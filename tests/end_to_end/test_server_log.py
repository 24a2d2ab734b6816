"""What a server's log tells an operator, from its start to its end, and what it keeps to itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from holdfast.sdk import ConnectionFailed, ServerError, connect

from .wires import Json, get

pytestmark = pytest.mark.anyio
KEY, WRONG, SECRET = "sk-right-key", "sk-wrong-key", "Marisol"


class Log:
    """The lines of a server, read as they come."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[Json] = []
        self.raw = ""

    async def until(self, text: str) -> Json:
        """The next line with this text in its message."""
        assert self._process.stderr is not None
        while line := (await self._process.stderr.readline()).decode():
            self.raw += line
            self.lines.append(json.loads(line))
            if text in self.lines[-1]["message"]:
                return self.lines[-1]
        raise AssertionError(f"the log ended without {text!r}: {self.raw}")


async def test_each_line_has_time_level_and_id_and_none_has_content(tmp_path: Path) -> None:
    program = "from holdfast.gateway.cli.main import main; main()"
    words = "serve pocket --port 0 --kv-bytes 16MiB --max-context 2048 --kernels reference --log-format json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, *words.split(), "--store", str(tmp_path / "store")),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HOLDFAST_API_KEY": KEY},
    )
    log = Log(process)
    try:
        url = (await log.until("pocket at http://"))["message"].split()[-1]
        order = [line["message"].partition(" ")[0] for line in log.lines]
        assert order[0] == "starting" and order[-3:] == ["weights", "sessions", "pocket"]
        assert any(line["process"] == "holdfast engine" and "loaded" in line["message"] for line in log.lines)

        with pytest.raises(ConnectionFailed):
            async with connect(url, api_key=WRONG) as wrong, wrong.session():
                pass
        rejected = await log.until("request refused")
        assert (rejected["level"], rejected["code"]) == ("warning", "invalid_api_key")
        assert rejected["id"].startswith("req_")

        async with connect(url, api_key=KEY) as client, client.session() as chat:
            about: dict[str, Any] = {"id": chat.session.id}
            assert about.items() <= (await log.until("session opened")).items()
            await chat.say(f"My name is {SECRET}.").text()
            ended = await log.until("response completed")
            receipt, usage = chat.last.kv, chat.last.usage
            assert receipt is not None and usage is not None
            about |= {"response": chat.last.response.id, "output": usage.output_tokens}
            about |= {"cached": receipt.resident, "host": receipt.host, "disk": receipt.disk}
            about |= {"prefilled": receipt.prefilled, "input": usage.input_tokens}
            assert about.items() <= ended.items() and 0 < ended["ttft_ms"] <= ended["total_ms"]

            with pytest.raises(ServerError):
                await chat.say("And?", grammar={"type": "regex", "pattern": f"({SECRET}"}).text()
            refused = await log.until("response")
            assert (refused["level"], refused["code"], refused["id"]) == (
                *("info", "invalid_grammar"),
                chat.session.id,
            )
            with pytest.raises(ServerError):
                await chat.rewind(SECRET)
            assert (await log.until("event refused"))["code"] == "item_not_found"

            _, numbers = await get(url, "/metrics", Authorization=f"Bearer {KEY}")
            assert "holdfast_engine_faults_total 0.0" in numbers, "a client's bad schema is no engine fault"
            assert "holdfast_engine_grammars_refused_total 1.0" in numbers

            os.kill(_engine(process.pid), signal.SIGKILL)
            assert (await log.until("died"))["level"] == "warning"
            await log.until("another engine serves")
            await chat.say("What is my name?").text()
            await log.until("response completed")
            handle = chat.handle
        async with connect(url, api_key=KEY) as client, client.resume(handle or ""):
            assert (await log.until("session resumed"))["source"] == "memory"
        process.send_signal(signal.SIGTERM)
        for told in ("draining", "session closed", "stopped"):
            await log.until(told)
        with anyio.fail_after(60):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
    assert all({"time", "level", "process", "id", "message"} <= line.keys() for line in log.lines)
    assert all(line["id"] for line in log.lines if "session" in line["message"].split()[:1])
    assert not [word for word in (SECRET, KEY, WRONG, handle) if word is not None and word in log.raw]


def _engine(server: int) -> int:
    """The process of a server's engine."""
    told = [(task / "children").read_text() for task in Path(f"/proc/{server}/task").iterdir()]
    children = [int(child) for child in " ".join(told).split()]
    return next(pid for pid in children if "holdfast.runtime" in Path(f"/proc/{pid}/cmdline").read_text())
