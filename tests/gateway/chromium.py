"""Debian's Chromium, driven over its DevTools protocol: real clicks, keys, screenshots, and its complaints.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--mute-audio",
)
SECONDS = 90.0
"""The longest wait for anything on a page, on a machine that does much else."""
KEYS = {"Enter": ("\r", 13), "Escape": ("", 27), "Tab": ("", 9), "Backspace": ("", 8)}
"""The text and the Windows code of keys that are no characters."""

Json = dict[str, Any]


def binary() -> str:
    """The browser's path; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("needs Chromium: `make chromium` installs it with apt")
    return found


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Browser]:
    """A browser with an empty profile in ``folder``. Ends with the block."""
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()  # as root it cannot have one
    process = await asyncio.create_subprocess_exec(
        binary(),
        *FLAGS,
        *sandbox,
        f"--user-data-dir={folder / 'profile'}",
        "about:blank",
        env={
            **os.environ,
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder),
            "XDG_CACHE_HOME": str(folder),
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    drain: asyncio.Task[bytes] | None = None
    try:
        url = await asyncio.wait_for(_address(process.stderr), SECONDS)
        drain = asyncio.create_task(process.stderr.read())  # else it stops once the pipe is full
        async with connect(url, max_size=None, compression=None, proxy=None, ping_interval=None) as socket:
            browser = Browser(socket)
            reading = asyncio.create_task(browser.read())
            try:
                yield browser
            finally:
                with suppress(ConnectionClosed, TimeoutError):
                    await asyncio.wait_for(browser.call("Browser.close"), 5)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
    finally:
        with suppress(ProcessLookupError, TimeoutError):
            await asyncio.wait_for(process.wait(), 5)
        if process.returncode is None:
            process.kill()
            await process.wait()
        if drain is not None:
            await asyncio.gather(drain, return_exceptions=True)


async def _address(stderr: asyncio.StreamReader) -> str:
    """Where the browser is driven, which it writes when it is ready."""
    seen = b""
    while line := await stderr.readline():
        seen += line
        if found := re.search(rb"DevTools listening on (ws://\S+)", line):
            return found[1].decode()
    raise AssertionError(f"the browser did not start: {seen[-2000:].decode(errors='replace')}")


@dataclass(eq=False)
class Browser:
    """The connection to a browser."""

    socket: ClientConnection
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _waiting: dict[int, asyncio.Future[Json]] = field(default_factory=dict)
    _pages: dict[str, Page] = field(default_factory=dict)

    async def call(self, method: str, session: str | None = None, **parameters: Any) -> Json:
        """The result of a command. Raises ``AssertionError`` with the browser's refusal."""
        number = next(self._numbers)
        command: Json = {"id": number, "method": method, "params": parameters}
        if session is not None:
            command["sessionId"] = session
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self.socket.send(json.dumps(command))
        answer = await asyncio.wait_for(self._waiting[number], SECONDS + 10)  # after `until` has told why
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    async def read(self) -> None:
        """Give answers to their callers and events to their pages, until the browser ends."""
        async for frame in self.socket:
            message = json.loads(frame)
            if "id" in message:
                waiting = self._waiting.pop(message["id"])
                if not waiting.done():
                    waiting.set_result(message)
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.take(message["method"], message["params"])

    async def open(self, url: str) -> Page:
        """A new page that has loaded ``url``."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        await page.call("Page.setLifecycleEventsEnabled", enabled=True)
        await page.go(url)
        return page


@dataclass(eq=False)
class Page:
    """One page. ``complaints``: errors that its scripts or the browser told of; a good page has none."""

    browser: Browser
    session: str
    target: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _loads: list[str] = field(default_factory=list)  # documents that have loaded, by the browser's id
    _loaded: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(self, method: str, **parameters: Any) -> Json:
        """A command for this page."""
        return await self.browser.call(method, self.session, **parameters)

    def take(self, method: str, told: Json) -> None:
        """Note what the browser tells of the page."""
        match method:
            case "Page.lifecycleEvent" if told["name"] == "load":
                self._loads.append(told["loaderId"])
                self._loaded.set()
            case "Runtime.exceptionThrown":
                details = told["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if told["entry"]["level"] == "error":
                self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])

    async def go(self, url: str) -> None:
        """Load ``url``; where only its fragment is new, the document stays."""
        loader = (await self.call("Page.navigate", url=url)).get("loaderId")
        async with asyncio.timeout(SECONDS):
            while loader is not None and loader not in self._loads:
                self._loaded.clear()
                await self._loaded.wait()

    async def reload(self) -> None:
        """Load the page again, as the user's key does."""
        self._loaded.clear()
        await self.call("Page.reload")
        await asyncio.wait_for(self._loaded.wait(), SECONDS)

    async def close(self) -> None:
        """Close the page."""
        await self.browser.call("Target.closeTarget", targetId=self.target)

    async def evaluate(self, script: str) -> Any:
        """The JSON value of an expression. Raises ``AssertionError`` with what it throws."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str, seconds: float = SECONDS) -> Any:
        """Wait until an expression is true in the page, and for the next frame, in which its scripts draw what
        led to it; its value."""
        waiting = f"""new Promise((resolve, reject) => {{
            const end = performance.now() + {seconds * 1000};
            const look = () => {{
                const value = {script};
                if (value) requestAnimationFrame(() => resolve(value));
                else if (performance.now() > end) reject(new Error("never true: " + {json.dumps(script)}));
                else setTimeout(look, 15);
            }};
            look();
        }})"""
        return await self.evaluate(waiting)

    async def text(self, selector: str) -> str:
        """The text of the first element that ``selector`` finds."""
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    async def click(self, selector: str) -> None:
        """Press the mouse on the middle of an element, once it can be clicked there and does not move."""
        name, middle = json.dumps(selector), None
        while middle != (middle := await self._middle(name)):
            await self.call("Input.dispatchMouseEvent", type="mouseMoved", **middle)
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **middle)

    async def _middle(self, name: str) -> Json:
        """Where an element can be clicked, a frame later."""
        return dict(
            await self.until(
                f"""(() => {{
                const element = document.querySelector({name});
                if (!element || element.disabled) return null;
                element.scrollIntoView({{ block: "nearest" }});
                const box = element.getBoundingClientRect();
                const at = {{ x: box.x + box.width / 2, y: box.y + box.height / 2 }};
                const top = document.elementFromPoint(at.x, at.y);
                return box.width && top && (element.contains(top) || top.contains(element)) ? at : null;
            }})()"""
            )
        )

    async def type(self, text: str) -> None:
        """Type into what has the focus, key by key."""
        for character in text:
            await self.call("Input.dispatchKeyEvent", type="char", text=character)

    async def press(self, key: str) -> None:
        """Press one key: a character, or one of `KEYS`."""
        text, code = KEYS.get(key, (key, 0))
        shown = {"text": text} if text else {}
        kind = "keyDown" if text else "rawKeyDown"
        await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **shown)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def resize(self, width: int, height: int, *, phone: bool = False, scale: float = 1) -> None:
        """Give the page a window of this size, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    async def prefer(self, scheme: str) -> None:
        """Have the system prefer ``light`` or ``dark``, and no movement."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        """Write what can be seen now as a PNG."""
        picture = (await self.call("Page.captureScreenshot", format="png"))["data"]
        await asyncio.to_thread(_write, path, base64.b64decode(picture))

    async def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(
            await self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        )

    async def offline(self, gone: bool) -> None:
        """Cut the page's network, or bring it back."""
        conditions = {"offline": gone, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        await self.call("Network.emulateNetworkConditions", **conditions)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
