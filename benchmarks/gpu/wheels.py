"""The packages that a machine with a GPU lacks, and a folder with their wheels.

``make gpu-wheels`` runs this file as a program: it downloads them into ``.whl/``, for Python 3.12 on x86-64
unless ``--python`` and ``--machine`` say otherwise. `run` unpacks those that are not installed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "pyproject.toml"
FOLDER = ROOT / ".whl"
_WITH_TORCH = (
    "torch triton transformers safetensors tokenizers numpy regex numba jinja2 huggingface_hub anyio "
    "rich typer xxhash prometheus_client"
)
WITH_TORCH = frozenset(_WITH_TORCH.split())
"""Packages that an image with torch and transformers has, too. They are not downloaded, because their wheels
are large or must fit its torch."""

GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
"""The versions 2.N of glibc that wheels are made for; pip must be given each of them."""


def named(*extras: str) -> list[str]:
    """The names of the packages that this program needs, and of those of these extras. All are imported under
    their names."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    requirements = [
        *project["dependencies"],
        *(one for extra in extras for one in project["optional-dependencies"][extra]),
    ]
    return sorted({re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in requirements})


def missing(*extras: str) -> list[str]:
    return [name for name in named(*extras) if find_spec(name.replace("-", "_")) is None]


def download(folder: Path, python: str, machine: str) -> int:
    """Download into ``folder`` the wheels of what the engine needs and an image with torch lacks. ``python``:
    the version, such as 3.12; ``machine``: such as x86_64. Returns pip's exit status."""
    platforms = [f"manylinux_2_{version}_{machine}" for version in GLIBC]
    platforms += [f"manylinux2014_{machine}", f"manylinux1_{machine}"]
    words = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    words += [word for platform in platforms for word in ("--platform", platform)]
    words += ["-c", str(ROOT / "constraints.txt"), "-d", str(folder)]
    names = [name for name in named("engine") if name not in WITH_TORCH]
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()  # two versions of one package must not meet
    return subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", *words, *names], check=False
    ).returncode


def unpack(folder: Path, target: Path) -> list[str]:
    """Unpack into ``target`` the wheels in ``folder`` of packages that are not installed, so that they can be
    imported from there. Returns a line for each wheel that is not for this Python."""
    from packaging.tags import sys_tags  # transformers needs it, so it is there
    from packaging.utils import parse_wheel_filename

    refused = []
    for wheel in sorted(folder.glob("*.whl")):
        name, _, _, tags = parse_wheel_filename(wheel.name)
        if find_spec(name.replace("-", "_")) is not None:
            continue
        if tags.isdisjoint(sys_tags()):
            refused.append(f"{wheel.name} is not for this Python {sys.version.split()[0]}")
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return refused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--machine", default="x86_64")
    asked = parser.parse_args()
    status = download(FOLDER, asked.python, asked.machine)
    if not status:
        wheels = sorted(FOLDER.glob("*.whl"))
        size = sum(wheel.stat().st_size for wheel in wheels) / (1 << 20)
        print(
            f"{len(wheels)} wheels, {size:.1f} MiB, in {FOLDER.name}/: {', '.join(one.name for one in wheels)}"
        )
    return status


if __name__ == "__main__":
    raise SystemExit(main())
