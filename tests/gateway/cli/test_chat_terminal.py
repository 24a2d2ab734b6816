"""`holdfast chat` in a pseudo-terminal, with a scripted server: keys, pastes, sessions, a lost server."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import msgspec
import pytest
import websockets

from holdfast.gateway.cli.chat import HELP
from holdfast.gateway.cli.chat_state import ChatState
from holdfast.sdk.frames import client, codec, server
from holdfast.sdk.frames.sampling import SamplingFields
from holdfast.sdk.frames.session import SessionResource

from ...sdk.scripted import Script
from .terminal import Terminal, chatting

pytestmark = pytest.mark.anyio
PASTE = "\x1b[200~{}\x1b[201~"
CTRL_C, CTRL_D, ALT_ENTER = "\x03", "\x04", "\x1b\r"


class ScriptedServer:
    """A server with one session. Its replies are `replies`, a list of texts or None: one that never ends."""

    def __init__(self, *replies: str | None) -> None:
        self.script = Script(*[None if one is None else [one] for one in replies], answer=self._answer)
        self.said: list[str] = []
        self.updates: list[client.ClientEvent] = []
        self.url = ""
        self.resumed = 0
        self._socket: websockets.asyncio.server.ServerConnection | None = None
        self._serving: websockets.asyncio.server.Server | None = None

    def _answer(self, script: Script, event: client.ClientEvent) -> list[server.ServerEvent]:
        if isinstance(event, client.ResponseCreate):
            self.said += [item.text for item in event.items or ()]
        if isinstance(event, client.SessionUpdate):
            self.updates.append(event)
        if isinstance(event, client.SessionResume):
            self.resumed += 1
            handle = f"hold_{self.resumed + 1}"
            return [server.SessionResumed(event_id=script.id(), session=script.session, handle=handle)]
        return list(script.usual(event))

    async def serve(self, port: int = 0) -> None:
        self._serving = await websockets.serve(self._converse, "127.0.0.1", port)
        self.url = f"ws://127.0.0.1:{self._serving.sockets[0].getsockname()[1]}"

    async def go(self) -> None:
        """Stop, as a server that is killed: its connections end at once."""
        assert self._serving is not None
        if self._socket is not None:
            self._socket.transport.abort()
        self._serving.close()
        await self._serving.wait_closed()

    async def close(self, code: int) -> None:
        """Close the client's socket with this code."""
        assert self._socket is not None
        await self._socket.close(code, "the key was removed")

    async def _converse(self, socket: websockets.asyncio.server.ServerConnection) -> None:
        self._socket = socket
        if "resume=true" not in socket.request.path:
            session = SessionResource(id="sess_1", model="pocket")
            greeting = server.SessionCreated(event_id="hello", session=session, handle="hold_1")
            await socket.send(codec.encode(greeting).decode())
        async with anyio.create_task_group() as group:
            group.start_soon(self._tell, socket)
            with suppress(websockets.ConnectionClosed):
                async for frame in socket:
                    await self.script.send(frame.encode() if isinstance(frame, str) else frame)
            group.cancel_scope.cancel()

    async def _tell(self, socket: websockets.asyncio.server.ServerConnection) -> None:
        while True:
            frame = await self.script.receive()
            if msgspec.json.decode(frame)["type"] not in ("session.created", "conversation.created"):
                await socket.send(frame.decode())


@asynccontextmanager
async def scripted(*replies: str | None) -> AsyncIterator[ScriptedServer]:
    served = ScriptedServer(*replies)
    await served.serve()
    try:
        yield served
    finally:
        await served.go()
        await served.script.aclose()


async def ended(terminal: Terminal) -> int:
    return await asyncio.to_thread(terminal.process.wait)


async def test_ctrl_c_clears_half_a_line_and_twice_on_an_empty_one_leaves(tmp_path: Path) -> None:
    async with scripted("Yes.") as served, chatting(served.url, tmp_path) as terminal:
        await terminal.until("you>")
        terminal.type("half a line")
        await terminal.until("half a line")
        terminal.type(CTRL_C + "whole\r")
        await terminal.until("Yes.")
        await terminal.until("you>")
        assert await terminal.leave() == 0
    assert served.said == ["whole"]


async def test_ctrl_d_leaves(tmp_path: Path) -> None:
    async with scripted() as served, chatting(served.url, tmp_path) as terminal:
        await terminal.until("you>")
        terminal.type(CTRL_D)
        assert await ended(terminal) == 0


async def test_ctrl_c_during_a_reply_cuts_it(tmp_path: Path) -> None:
    async with scripted(None, "Yes.") as served, chatting(served.url, tmp_path) as terminal:
        await terminal.until("you>")
        terminal.type("go\r")
        await terminal.until("Once ")
        terminal.type(CTRL_C)
        await terminal.until("cancelled: client_cancelled")
        await terminal.until("you>")
        terminal.type("on\r")
        await terminal.until("Yes.")
    assert served.said == ["go", "on"]


async def test_a_paste_is_one_message_and_lines_can_be_broken(tmp_path: Path) -> None:
    async with scripted("A.", "B.", "C.") as served, chatting(served.url, tmp_path) as terminal:
        for typed, reply in (
            (PASTE.format("one\r\ntwo\rthree\n"), "A."),
            ("four\\\rfive", "B."),
            (f"six{ALT_ENTER}seven", "C."),
        ):
            await terminal.until("you>")
            terminal.type(f"{typed}\r")
            await terminal.until(reply)
    assert served.said == ["one\ntwo\nthree", "four\nfive", "six\nseven"]


async def test_a_paste_during_a_reply_is_one_message_at_the_next_prompt(tmp_path: Path) -> None:
    async with scripted(None, "Yes.") as served, chatting(served.url, tmp_path) as terminal:
        await terminal.until("you>")
        terminal.type("go\r")
        await terminal.until("Once ")
        terminal.type(PASTE.format("one\rtwo"))
        response_id = served.script.running[-1]
        for event in served.script.cancel(client.ResponseCancel(response_id=response_id)):
            served.script.tell(event)
        await terminal.until("two")
        terminal.type("\r")
        await terminal.until("Yes.")
    assert served.said == ["go", "one\ntwo"]


async def test_a_dumb_terminal_will_do(tmp_path: Path) -> None:
    async with scripted("Yes.") as served, chatting(served.url, tmp_path, term="dumb") as terminal:
        await terminal.until("you>")
        terminal.type("half" + CTRL_C)
        await terminal.until("you>")
        terminal.type("hello\r")
        await terminal.until("Yes.")
        await terminal.until("you>")
        terminal.type(CTRL_D)
        assert await ended(terminal) == 0
        assert "\x1b" not in terminal.raw
    assert served.said == ["hello"]


async def test_words_are_not_broken_at_the_edge(tmp_path: Path) -> None:
    text = "The q|uick br|own fox j|umps o|ver the ext|raordin|arily la|zy dog an|d sleeps"
    words = text.replace("|", "").split()
    async with scripted(text) as served, chatting(served.url, tmp_path, columns=20) as terminal:
        await terminal.until("you>")
        terminal.type("go\r")
        await terminal.until("first text")
        lines = rendered(terminal.raw, 20)
    begin = next(at for at, line in enumerate(lines) if line.startswith("The quick"))
    shown = [word for line in lines[begin:] for word in line.split()]
    assert shown[: len(words)] == words


async def test_words_of_notices_are_not_broken_at_the_edge(tmp_path: Path) -> None:
    async with scripted() as served, chatting(served.url, tmp_path, columns=30) as terminal:
        for typed, last in (("/help", HELP.split()[-1]), ("/set colour red", "stop_token_ids")):
            await terminal.until("you>")
            terminal.type(f"{typed}\r")
            await terminal.until(last)  # what is typed meanwhile would stand between the words
        shown = {word for line in rendered(terminal.raw, 30) for word in line.split()}
    assert {*HELP.split(), "repetition_penalty,", "presence_penalty,"} <= shown


def rendered(raw: str, columns: int) -> list[str]:
    """The lines that a terminal shows for a text with backspaces; sequences are left out."""
    lines: list[list[str]] = [[]]
    at = 0
    for character in Terminal.plain(raw):
        if character == "\b":
            at = max(0, at - 1)
        elif character == "\n":
            lines.append([])
            at = 0
        else:
            if at == columns:
                lines.append([])
                at = 0
            lines[-1][at : at + 1] = character
            at += 1
    return ["".join(line) for line in lines]


async def test_a_session_is_kept_listed_and_resumed(tmp_path: Path) -> None:
    async with scripted("Hello.", "Again.", "Third.") as served:
        async with chatting(served.url, tmp_path) as terminal:
            await terminal.until("you>")
            terminal.type("My name is Marisol.\r")
            await terminal.until("Hello.")
            await terminal.until("you>")
            terminal.type(CTRL_D)
            await terminal.until("--resume")
            assert await ended(terminal) == 0
        file = ChatState(tmp_path / "holdfast").file
        assert file.stat().st_mode & 0o777 == 0o600
        for words, said in ((["--resume"], "two"), (["--resume", "sess_1"], "three")):
            async with chatting("", tmp_path, *words) as terminal:
                await terminal.until("resumed: My name is Marisol.")
                await terminal.until("you>")
                terminal.type("/sessions\r")
                await terminal.until(f"pocket at {served.url}/v1/realtime  My name is Marisol.")
                await terminal.until("you>")
                terminal.type(f"{said}\r")
                await terminal.until("first text")
    assert served.said == ["My name is Marisol.", "two", "three"] and served.resumed == 2


async def test_a_server_that_is_gone_is_told_at_once_and_waited_for(tmp_path: Path) -> None:
    async with scripted(None, "Yes.") as served, chatting(served.url, tmp_path) as terminal:
        await terminal.until("you>")
        terminal.type("go\r")
        await terminal.until("Once ")
        await served.go()
        told = await terminal.until("s left; Ctrl-C stops")
        assert f"{served.url}/v1/realtime is lost" in told and "--resume hold_1 goes on" in told
        await terminal.until("try 2, ")
        await served.serve(int(served.url.rpartition(":")[2]))
        await terminal.until("the connection is back")


async def test_ctrl_c_stops_waiting_for_a_server_that_is_gone(tmp_path: Path) -> None:
    async with scripted(None) as served, chatting(served.url, tmp_path) as terminal:
        await terminal.until("you>")
        terminal.type("go\r")
        await terminal.until("Once ")
        await served.go()
        await terminal.until("s left; Ctrl-C stops")
        terminal.type(CTRL_C)
        await terminal.until("stopped waiting; the server reads your message when it is back")
        await terminal.until("you>")
        assert await terminal.leave() == 0


async def test_after_a_refused_key_the_next_message_tries_again(tmp_path: Path) -> None:
    async with scripted(None, "Yes.") as served, chatting(served.url, tmp_path) as terminal:
        await terminal.until("you>")
        terminal.type("go\r")
        await terminal.until("Once ")
        await served.close(1008)
        await terminal.until("1008")
        await terminal.until("you>")
        terminal.type("again\r")
        await terminal.until("the connection is back")
        await terminal.until("Yes.")
        await terminal.until("you>")
        assert await terminal.leave() == 0
    assert served.said == ["go", "again"] and served.resumed == 1


async def test_an_option_with_a_wrong_value_is_told_with_the_allowed_ones(tmp_path: Path) -> None:
    async with scripted() as served, chatting(served.url, tmp_path, "--temperature", "9") as terminal:
        await terminal.until("temperature cannot be 9.0; allowed: number (≥ 0, ≤ 2) or null")
        assert await ended(terminal) == 2


async def test_options_and_commands_set_the_system_prompt_and_parameters(tmp_path: Path) -> None:
    words = ("--system", "Be brief.", "--temperature", "0.5", "--max-tokens", "9")
    async with scripted() as served, chatting(served.url, tmp_path, *words) as terminal:
        for typed, told in (
            ("/system", "system prompt: Be brief."),
            ("/set", "temperature 0.5"),
            ("/set temperature 0.2", "temperature 0.2"),
            ("/set max-tokens 7", "max_output_tokens 7"),
            ("/set colour red", "there is no parameter colour"),
            ("/set top_logprobs 5", "there is no parameter top_logprobs"),
            ("/fork 3", "/fork takes nothing behind it"),
            ("/set temperature high", 'temperature cannot be "high"; allowed: number (≥ 0, ≤ 2) or null'),
            ("/set top_p 2", "top_p cannot be 2; allowed: number (≥ 0, ≤ 1) or null"),
            ("/set max-tokens many", 'max_output_tokens cannot be "many"; allowed: integer (≥ 1, '),
            ("/set temperature", "temperature not set"),
            ('/set logit_bias {"1": 5}', 'logit_bias {"1": 5.0}'),
            ("/system Be kind.", "system prompt: Be kind."),
        ):
            await terminal.until("you>")
            terminal.type(f"{typed}\r")
            await terminal.until(told)


async def test_set_lists_all_that_can_be_set_with_its_value(tmp_path: Path) -> None:
    async with scripted() as served:
        ran = await asyncio.to_thread(piped, served.url, tmp_path, '/set stop ["END"]\n/set\n')
    listed = dict(line.split(" ", 1) for line in ran.stderr.splitlines()[1:])
    assert set(listed) == set(SamplingFields.__struct_fields__) - {"top_logprobs"}
    assert (listed["stop"], listed["seed"], listed["max_output_tokens"]) == ('["END"]', "not set", '"inf"')


def piped(url: str, state: Path, text: str) -> subprocess.CompletedProcess[str]:
    program = "from holdfast.gateway.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "chat", url],
        input=text,
        capture_output=True,
        text=True,
        env={"XDG_STATE_HOME": str(state), "PATH": ""},
        check=False,
    )


async def test_lines_of_a_pipe_are_messages_and_stdout_has_the_replies_alone(tmp_path: Path) -> None:
    async with scripted("A.", "B.|\x07") as served:
        ran = await asyncio.to_thread(piped, served.url, tmp_path, "one\\\ntwo\n\nthree")
    assert served.said == ["one\ntwo", "three"]
    assert (ran.returncode, ran.stdout) == (0, "A.\nB.\x07\n") and "first text after" in ran.stderr


async def test_ctrl_c_ends_a_chat_that_reads_a_pipe(tmp_path: Path) -> None:
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        " from holdfast.gateway.cli.main import main; main()"
    )
    async with scripted(None) as served:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, "chat", served.url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"XDG_STATE_HOME": str(tmp_path), "PATH": ""},
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"go\nnever\n")
        assert await process.stdout.readexactly(5) == b"Once "
        process.send_signal(signal.SIGINT)
        assert await process.wait() != 0
        process.stdin.close()
    assert served.said == ["go"]


async def test_a_reply_that_fails_from_a_pipe_is_exit_1(tmp_path: Path) -> None:
    async with scripted("A.") as served:
        ran = await asyncio.to_thread(piped, served.url, tmp_path, "/set temperature high\none\n")
    assert (ran.returncode, ran.stdout) == (1, "A.\n") and "invalid_value" in ran.stderr


@pytest.mark.parametrize("words", [["--resume"], ["--resume", "sess_9"]])
async def test_without_such_a_session_resume_is_one_line(tmp_path: Path, words: list[str]) -> None:
    async with chatting("", tmp_path, *words) as terminal:
        told = await terminal.until("are kept")
        assert "has no session" in told and "holdfast chat alone begins a new session" in told
        assert await ended(terminal) == 2
