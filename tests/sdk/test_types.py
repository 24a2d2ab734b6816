"""What a type checker sees of the SDK in an editable install: its names, and a misspelt keyword."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOOD = """
from holdfast.sdk import Chat, SamplingOptions, connect
from holdfast.sdk.sync import SyncChat

async def right(chat: Chat) -> str:
    usual: SamplingOptions = {"temperature": 0.5, "top_p": 0.9}
    async with connect() as client, client.session(instructions="Be brief.", **usual) as other:
        await other.update(seed=1, tools=[])
        async for piece in other.steer("Hello!", stop=["."]):
            print(piece)
    await chat.say("Hello!", **usual)
    return (await chat.say("Hello!", max_output_tokens=5)).text

def plain(chat: SyncChat) -> str:
    return chat.say("Hello!", temperature=0).finish().text
"""
BAD = """
from holdfast.sdk import Chat, connect
from holdfast.sdk.sync import SyncChat

async def wrong(chat: Chat, plain: SyncChat) -> None:
    await chat.say("Hello!", temprature=0)
    await chat.respond(max_tokens=5)
    await chat.run("Go", top_p="high")
    await chat.update(temprature=0)
    plain.say("Hello!", temprature=0)
    async with connect() as client, client.session(temprature=0):
        pass
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the package as `pip install -e . --config-settings editable_mode=strict` installs it:
    without the finder that no type checker follows."""
    home = tmp_path_factory.mktemp("editable")
    copy, wheels = home / "checkout", home / "wheels"
    copy.mkdir()
    wheels.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in dict.fromkeys(tracked):  # in a merge git names a file more than once
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/results/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).symlink_to(ROOT / name)
    build = "import sys; from setuptools.build_meta import build_editable as build\n"
    build += "build(sys.argv[1], {'editable_mode': 'strict'})"
    subprocess.run([sys.executable, "-c", build, str(wheels)], cwd=copy, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "env")], check=True)
    (packages,) = (home / "env").glob("lib/python*/site-packages")
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    for needed in ("anyio", "msgspec", "websockets"):
        module = __import__(needed)
        (packages / needed).symlink_to(Path(module.__file__ or "").parent)
    return home / "env" / "bin" / "python"


def checked(python: Path, folder: Path, source: str) -> str:
    """What mypy says about a user's file, strictly."""
    file = folder / "user.py"
    file.write_text(source)
    options = [
        "--strict",
        "--python-executable",
        str(python),
        "--config-file",
        "",
        "--cache-dir",
        str(folder),
    ]
    command = [sys.executable, "-m", "mypy", *options, str(file)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False).stdout


def test_a_type_checker_sees_the_package_and_a_misspelt_keyword(python: Path, tmp_path: Path) -> None:
    told = checked(python, tmp_path, GOOD)
    assert told.startswith("Success"), told
    lines = [line for line in checked(python, tmp_path, BAD).splitlines() if " error: " in line]
    assert len(lines) == 6, lines
    for at, misspelt in ((5, "temprature"), (6, "max_tokens"), (7, "top_p"), (8, "temprature")):
        assert lines[at - 5].startswith(f"user.py:{at + 1}:") and misspelt in lines[at - 5], lines
    assert "temprature" in lines[4] and "temprature" in lines[5], lines
