"""The built wheel: it holds every file the demo needs, and the SDK alone needs no torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from hashlib import sha1
from pathlib import Path
from zipfile import ZipFile

import pytest

from holdfast.kernels.cpu.compiling import cache_folder

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "PYTHONSAFEPATH": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (
        f"{command}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the files that git knows, as a release would be, so that a stray build/ cannot help."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--wheel", "--outdir", out, source, cwd=out)
    return next(out.glob("*.whl"))


def bring_compiled(site: Path) -> None:
    """Kernels compiled from the same sources are found, by the name that numba gives a folder of sources."""
    kept, package = Path(cache_folder() or "none"), site / "holdfast" / "kernels" / "cpu"
    name = f"{package.name}_{sha1(str(package).encode()).hexdigest()}"
    for folder in kept.glob(f"{package.name}_*"):
        shutil.copytree(folder, package / "__pycache__" / kept.name / name, dirs_exist_ok=True)


@pytest.mark.timeout(900)
def test_the_demo_from_the_wheel_recalls_calls_and_counts(wheel: Path, tmp_path: Path) -> None:
    """In an empty folder, with a real server, socket and engine process; it is 0 only if its claims hold."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--target", site, wheel, cwd=empty)
    where = run(
        sys.executable, "-c", "import holdfast; print(holdfast.__file__)", cwd=empty, PYTHONPATH=str(site)
    )
    assert Path(where.strip()).is_relative_to(site)
    bring_compiled(site)
    shown = run(sys.executable, site / "bin" / "holdfast", "demo", cwd=empty, PYTHONPATH=str(site))
    read = re.findall(r"first text after \d+ ms · .* · \d+ tokens? read, \d+ known before(.*)", shown)
    assert len(read) >= 6 and not any("known once" in rest for rest in read)
    assert "Every turn prefilled exactly its new tokens" in shown
    assert "called get_weather(" in shown
    assert "the engine was killed in mid-reply" in shown
    assert "the server was killed in mid-reply" in shown
    assert "tokens settled to disk in" in shown
    assert not list(empty.iterdir())


def test_the_pages_and_what_documents_are_made_of_are_in_the_wheel(wheel: Path) -> None:
    there = set(ZipFile(wheel).namelist())
    folder, named = ROOT / "gateway" / "page", ("index.html", "docs.html", "app.js", "vendor/LICENSES.txt")
    pages = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(named) <= pages
    assert {f"holdfast/gateway/page/{name}" for name in pages} <= there
    assert "holdfast/gateway/documents/api.py" in there


@pytest.mark.timeout(300)
def test_the_sdk_installs_without_the_engine(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=tmp_path)
    program = "import sys, holdfast.sdk; assert holdfast.sdk.connect; print('torch' in sys.modules)"
    assert run(python, "-c", program, cwd=tmp_path).strip() == "False"
    listed = run(python, "-m", "pip", "list", "--format", "freeze", cwd=tmp_path)
    assert not {"torch", "transformers", "starlette"} & {line.split("==")[0] for line in listed.split()}
