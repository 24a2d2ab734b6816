"""The command line: argv and environment become settings; nothing heavy is imported before it is needed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.gateway.cli import main
from holdfast.gateway.settings import DEFAULT_PORT, GatewaySettings, Network
from holdfast.runtime.settings import EngineSettings

HEAVY = ("torch", "transformers", "starlette", "uvicorn", "tokenizers", "numpy")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `server` would have run with."""
    calls: list[Any] = []
    monkeypatch.setattr("holdfast.gateway.cli.serve.run", lambda *given: calls.append(given[:2]) or 0)
    monkeypatch.setattr("holdfast.runtime.link.child.spawned_early", nullcontext)
    monkeypatch.delenv("HOLDFAST_API_KEY", raising=False)
    monkeypatch.delenv("HOLDFAST_PORT", raising=False)
    return calls


def invoke(*words: str, **environment: str) -> tuple[int, str]:
    before = signal.getsignal(signal.SIGTERM)
    try:
        result = CliRunner().invoke(main.app, list(words), env=environment)
    finally:
        signal.signal(signal.SIGTERM, before)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from holdfast.gateway.cli.main import app\n"
        f"code = CliRunner().invoke(app, {words!r}).exit_code\n"
        f"print(code, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0 []"


def test_the_gateways_process_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, holdfast.gateway.server\n"
        "from holdfast.runtime.model.folder import find_model\n"
        "from holdfast.sessions.text.language import Language; Language.load(find_model('pocket'))\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_serve_without_options_takes_the_defaults(served: list[Any], tmp_path: Path) -> None:
    assert invoke("serve", "pocket", XDG_STATE_HOME=str(tmp_path))[0] == 0
    assert served == [
        (
            GatewaySettings(store=tmp_path / "holdfast" / "pocket"),
            EngineSettings(model="pocket", store=str(tmp_path / "holdfast" / "pocket")),
        )
    ]
    assert served[0][0].port == DEFAULT_PORT and served[0][0].host == "127.0.0.1"


def test_options_become_settings(served: list[Any]) -> None:
    words = (
        "serve some/model --host 0.0.0.0 --port 9 --api-key k --device cpu --dtype float32 --kv-bytes 1.5GiB"
    )
    words += (
        " --kernels reference --max-context 100 --max-step-tokens 64 --max-sequences 8 --store /some/where"
    )
    assert invoke(*words.split())[0] == 0
    gateway, engine = served[0]
    assert gateway == GatewaySettings(host="0.0.0.0", port=9, api_key="k", store=Path("/some/where"))
    assert engine == EngineSettings(
        model="some/model",
        device="cpu",
        dtype="float32",
        kv_bytes=1536 << 20,
        store="/some/where",
        kernels="reference",
        max_context=100,
        max_step_tokens=64,
        max_sequences=8,
    )


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("--enforce-eager --gpu-memory-utilization 0.5", {"enforce_eager": True, "memory_utilization": 0.5}),
        (
            "--cudagraph-capture-sizes 1,2,8 --cudagraph-capture-lazily",
            {"capture_sizes": (1, 2, 8), "capture_lazily": True},
        ),
        ("--cudagraph-capture-sizes=", {"capture_sizes": ()}),
    ],
)
def test_options_of_a_gpu_become_settings(served: list[Any], words: str, changes: dict[str, Any]) -> None:
    assert invoke("serve", "pocket", "--no-store", *words.split())[0] == 0
    assert served[0][1] == EngineSettings(model="pocket", **changes)
    served.clear()
    assert invoke("serve", "pocket", "--no-store", "--cudagraph-capture-sizes", "4, 2 1")[0] == 0
    assert served[0][1].capture_sizes == (4, 2, 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--cudagraph-capture-sizes", "1,0"), "--cudagraph-capture-sizes 1,0: a graph has 1 row or more"),
        (("--cudagraph-capture-sizes=-4",), "--cudagraph-capture-sizes -4: a graph has 1 row or more"),
        (
            ("--cudagraph-capture-sizes", "1,two"),
            "'1,two' is not a list of numbers such as 1,2,4,8, each 1 or",
        ),
        (
            ("--gpu-memory-utilization", "1.1"),
            "--gpu-memory-utilization 1.1 is not more than 0 and at most 1",
        ),
        (("--gpu-memory-utilization", "0"), "--gpu-memory-utilization 0 is not more than 0 and at most 1"),
        (("--store", "~no-such-user/x"), "--store ~no-such-user/x: there is no user of this name"),
    ],
)
def test_wrong_options_are_refused_with_what_is_allowed(
    served: list[Any], words: tuple[str, ...], told: str
) -> None:
    code, error = invoke("serve", "pocket", *words)
    assert code == 2 and told in error and error.count("\n") == 1 and not served


def test_the_pages_are_served_unless_they_are_switched_off(served: list[Any]) -> None:
    for words, page in (([], True), (["--page"], True), (["--no-page"], False)):
        assert invoke("serve", "pocket", "--no-store", *words)[0] == 0
        assert served.pop()[0].page is page


def test_options_of_the_network_become_settings(served: list[Any]) -> None:
    words = (
        "serve pocket --no-store --allowed-host a.example --allowed-host *.b.example --root-path /holdfast/"
    )
    words += " --trusted-proxies 10.0.0.0/8,::1 --trusted-proxies 192.0.2.1 --operator-key root"
    words += " --ssl-certfile /some/cert --ssl-keyfile /some/key --ssl-keyfile-password hush --api-key k"
    assert invoke(*words.split())[0] == 0
    settings = served[0][0]
    assert (settings.api_key, settings.operator_key) == ("k", "root")
    assert settings.network == Network(
        allowed_hosts=("a.example", "*.b.example"),
        trusted_proxies=("10.0.0.0/8", "::1", "192.0.2.1"),
        root_path="/holdfast",
        certificate=Path("/some/cert"),
        private_key=Path("/some/key"),
        private_key_password="hush",
    )
    assert not re.search("hush|'root'|'k'", repr(settings))


def test_sessions_may_be_kept_in_memory_alone(served: list[Any]) -> None:
    assert invoke("serve", "pocket", "--no-store")[0] == 0
    assert served[0][0].store is None


def test_a_home_folder_in_the_environment_is_the_users(served: list[Any], tmp_path: Path) -> None:
    """No shell has replaced it there; journal and KV lie in one folder."""
    assert invoke("serve", "pocket", HOLDFAST_STORE="~/kept", HOME=str(tmp_path))[0] == 0
    gateway, engine = served[0]
    assert gateway.store == tmp_path / "kept" and engine.store == str(tmp_path / "kept")


def test_the_environment_is_read_here(served: list[Any]) -> None:
    assert invoke("serve", "pocket", HOLDFAST_API_KEY="from-env", HOLDFAST_PORT="77")[0] == 0
    assert (served[0][0].api_key, served[0][0].port) == ("from-env", 77)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("8 GiB", 8 << 30),
        ("2g", 2 << 30),
        ("1KB", 1024),
        ("1T", 1 << 40),
    ],
)
def test_sizes(served: list[Any], text: str, size: int) -> None:
    assert invoke("serve", "pocket", "--kv-bytes", text)[0] == 0
    assert served[0][1].kv_bytes == size


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "pocket", "--kv-bytes", "lots"],
        ["serve", "pocket", "--kv-bytes", "0"],
        ["serve", "pocket", "--kv-bytes", "9" * 400],
        ["serve", "pocket", "--disk-bytes", "8388608TiB"],
        ["serve", "pocket", "--port", "70000"],
        ["serve", "pocket", "--allowed-host", "http://a.example"],
        ["serve", "pocket", "--trusted-proxies", "the proxy"],
        ["serve", "pocket", "--root-path", "holdfast"],
        ["serve", "pocket", "--ssl-keyfile", "/some/key"],
        ["serve", "pocket", "--kernels", "fast"],
        ["serve", "pocket", "--max-context", "0"],
        ["serve"],
        ["bench", "nothing"],
        ["bench", "../demo"],
        ["bench", "toys"],
        ["fly"],
    ],
)
def test_invalid_options_are_refused_with_exit_2(served: list[Any], words: list[str]) -> None:
    code, output = invoke(*words)
    assert code == 2 and output.strip()
    assert not served


def test_a_benchmark_that_is_ended_ends_what_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[str]()

    def measuring(_words: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            ended.append("server")
        return 0

    monkeypatch.setattr("holdfast.benchmarks.memory.main", measuring)
    assert invoke("bench", "memory")[0] == 128 + signal.SIGTERM
    assert ended == ["server"]


def test_a_benchmark_is_a_module_with_a_main(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr("holdfast.benchmarks.pocket.bench.main", lambda words: given.append(words) or 0)
    assert invoke("bench", "pocket", "--count", "3")[0] == 0
    assert given == [["--count", "3"]]


def test_the_version_is_the_packages() -> None:
    code, output = invoke("--version")
    assert code == 0 and output.strip() == f"holdfast {metadata.version('holdfast-llm')}"


def test_an_action_on_a_folder_that_is_no_store_is_refused_in_a_line(tmp_path: Path) -> None:
    for words, cause in (
        (("stat",), "which store?"),
        (("stat", str(tmp_path)), f"{tmp_path}: no store"),
        (("clear", str(tmp_path / "none")), f"{tmp_path / 'none'}: no such folder"),
    ):
        code, told = invoke("store", *words)
        assert code == 2 and cause in told and len(told.splitlines()) == 1
