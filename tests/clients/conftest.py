"""The environments of the clients: each package, or family of packages, lives apart from ours and the others.

`.venv-clients` has `openai` and what is built on it (it pins an older websockets than ours), and
`.venv-clients-NAME` what `NAME.txt` of this folder names. `.venv-clients-node` has the packages of
`node/package.json`. A test is skipped where its environment is missing. Tests that drive a client are marked
with its name (`ENVIRONMENTS`); a run of this folder ends with a table of the calls that each client made.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway import server

from .calls import ENVIRONMENTS, ROOT, Calls, ClientRow, table

HERE = Path(__file__).resolve().parent
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
NODE = ROOT / ".venv-clients-node"
SECONDS = 300
"""For a client's program: some libraries take twenty seconds of a busy machine to be imported."""

COUNTED = pytest.StashKey[Calls]()


def pytest_configure(config: pytest.Config) -> None:
    told = "client(name): drives this package; its calls are counted in the table of `make clients`"
    config.addinivalue_line("markers", told)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("client"):
            item.add_marker(pytest.mark.timeout(SECONDS + 100))


@pytest.fixture(autouse=True)
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Counts the calls to the servers that the test starts. At its end, the client must have sent the fields
    that the table of ignored fields says it sends."""
    counted = request.node.stash[COUNTED] = Calls()
    build_app = server.build_app
    monkeypatch.setattr(server, "build_app", lambda service: counted.around(build_app(service)))
    yield counted
    client = request.node.get_closest_marker("client")
    if client is not None:
        assert not counted.unsent(client.args[0]), "the table in gateway/clients.py says that it sends these"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the client of a test, and its calls, into the report."""
    report = yield
    client = item.get_closest_marker("client")
    if client is not None and (report.when == "call" or report.outcome != "passed"):
        calls = item.stash.get(COUNTED, Calls())
        report.user_properties.append(("client", [client.args[0], dict(calls.routes)]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of clients, if any was driven."""
    rows = defaultdict[str, ClientRow](ClientRow, {name: ClientRow() for name in ENVIRONMENTS})
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "client":
                    client, routes = value
                    rows[client].routes.update(routes)
                    rows[client].outcomes[outcome] += 1
    told = {name: row for name, row in rows.items() if row.outcomes}
    if told:
        terminalreporter.section("clients")
        for line in table(told):
            terminalreporter.line(line)
        if terminalreporter.verbosity > 0:
            for name, row in told.items():
                terminalreporter.line("")
                for route, count in sorted(row.routes.items()):
                    terminalreporter.line(f"{name}: {count} x {route}")


def printed(command: list[str | Path], given: str = "", folder: Path | None = None) -> Any:
    """Runs a client's program: standard input in, the JSON it prints out."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        command,
        input=given,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def needs(*modules: str) -> None:
    """Skip the test unless `.venv-clients` has these modules. They are looked for, not imported: that takes
    seconds."""
    asked = f"import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, {modules})))"
    if not PYTHON.exists() or subprocess.run([PYTHON, "-c", asked], capture_output=True).returncode:
        pytest.skip(f"no {', '.join(modules)} in .venv-clients: `make clients` installs them")


@pytest.fixture(scope="session")
def client_script() -> Callable[..., Any]:
    """Runs a script of this folder in `.venv-clients`."""
    if not PYTHON.exists():
        pytest.skip("no .venv-clients here: `make clients` makes it")

    def run(script: str, *arguments: str, given: str = "") -> Any:
        return printed([PYTHON, HERE / script, *arguments], given)

    return run


@pytest.fixture(scope="session")
def script_in() -> Callable[..., Any]:
    """Runs a script of this folder in `.venv-clients-NAME`: the name, the script and its arguments."""

    def run(name: str, script: str, *arguments: str) -> Any:
        python = ROOT / f".venv-clients-{name}" / "bin" / "python"
        if not (python.parent.parent / "ready").exists():
            pytest.skip(f"no .venv-clients-{name} here: `make clients` makes it")
        return printed([python, HERE / script, *arguments])

    return run


@pytest.fixture(scope="session")
def node_script() -> Callable[..., Any]:
    """Runs a module of `node/` with the packages of `.venv-clients-node`.

    It is read from standard input, so that Node looks for packages where it runs.
    """
    if not (NODE / "ready").exists() or shutil.which("node") is None:
        pytest.skip("no .venv-clients-node here: `make clients` makes it, with Node")

    def run(script: str, *arguments: str) -> Any:
        source = (HERE / "node" / script).read_text()
        return printed(["node", "--input-type=module", "-", *arguments], source, NODE)

    return run


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
