"""Runs guidellm and aiperf against a server with the pocket model, and keeps their reports.

    make load-clients

Each is a program in an environment of its own (`.venv-clients-NAME`). Its tokenizer is the
pocket model's folder.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import sys
import tempfile
from pathlib import Path

from holdfast.gateway.server import serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings

ROOT = Path(__file__).resolve().parent.parent.parent
POCKET = ROOT / "runtime" / "pocket"
RESULTS = ROOT / "benchmarks" / "results" / "clients"

GUIDELLM = (
    "guidellm run --backend kind=openai_http,target={url},model=pocket"
    " --profile kind=concurrent,streams={streams}"
    " --constraint kind=max_requests,count={count} --tokenizer kind=huggingface_auto,model={pocket}"
    " --data kind=synthetic_text,prompt_tokens=128,output_tokens=32"
    " --output kind=csv,path={folder}/guidellm.csv --disable-progress"
)
AIPERF = (
    "aiperf profile --model pocket --url {url} --endpoint-type chat --streaming --tokenizer {pocket} --isl 128"
    " --osl 32 --extra-inputs ignore_eos:true --concurrency {streams} --request-count {count} --random-seed 1"
    " --artifact-dir {folder} --ui none --no-gpu-telemetry"
)
PROGRAMS = {
    "guidellm": (GUIDELLM, "guidellm.csv", "guidellm.csv"),
    "aiperf": (AIPERF, "profile_export_aiperf.json", "aiperf.json"),
}
"""For each program its command, the file that it writes its report to, and the name under which the report is
kept."""


def failed(name: str, text: str) -> float:
    """The number of failed requests in the report ``text`` of the program ``name``. Both programs exit with 0
    even if all requests failed."""
    if name == "aiperf":
        return float((json.loads(text).get("error_request_count") or {"avg": 0})["avg"])
    heads, kinds, _, figures = csv.reader(text.splitlines())
    columns = list(zip(heads, kinds, strict=True))
    return float(figures[columns.index(("Request Counts", "Errored"))])


async def report(name: str, url: str, streams: int, count: int) -> None:
    """Run one program against the server at ``url`` and keep its report. ``streams``: requests at once.
    ``count``: requests in all. Raises ``RuntimeError`` if the program or a request fails."""
    command, written, kept = PROGRAMS[name]
    python = ROOT / f".venv-clients-{name}" / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        fields = {"url": url, "streams": streams, "count": count, "pocket": POCKET, "folder": folder}
        program, *arguments = [word.format(**fields) for word in command.split()]
        environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
        running = await asyncio.create_subprocess_exec(
            python, python.parent / program, *arguments, env=environment, cwd=folder
        )
        if status := await running.wait():
            raise RuntimeError(f"{name} ended with {status}")
        text = (Path(folder) / written).read_text().replace(str(ROOT), ".").replace(folder, "build")
    if wrong := int(failed(name, text)):
        raise RuntimeError(f"{wrong} requests of {name} failed")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / kept).write_text(text)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(PROGRAMS), help="guidellm, aiperf")
    parser.add_argument("--streams", type=int, default=4, help="requests at once")
    parser.add_argument("--count", type=int, default=40, help="requests of each program")
    options = parser.parse_args()
    async with serving(GatewaySettings(port=0), EngineSettings(model="pocket")) as server:
        for name in options.names:
            await report(name, server.url, options.streams, options.count)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
