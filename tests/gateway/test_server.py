"""What keeps a server from starting is told for what it is: an address, or the machine."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway import server
from holdfast.gateway.cli.serve import run
from holdfast.gateway.settings import GatewaySettings, Network
from holdfast.runtime.settings import EngineSettings


def started(**fields: Any) -> int:
    return run(GatewaySettings(**fields), EngineSettings(model="pocket"))


@pytest.mark.parametrize("host", ["203.0.113.1", "a..b", "no such name"])
def test_an_address_that_is_not_ours_is_said(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert started(host=host, port=9) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"holdfast: cannot listen on {host}:9: ")


def test_a_certificate_that_is_none_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for network, cause in (
        (Network(certificate=tmp_path / "none.pem"), f"--ssl-certfile {tmp_path / 'none.pem'}: No such file"),
        (Network(certificate=wrong, private_key=tmp_path / "no.key"), f"--ssl-keyfile {tmp_path / 'no.key'}"),
        (Network(certificate=wrong), f"--ssl-certfile {wrong} and its key {wrong} are no usable pair: "),
    ):
        assert started(port=0, network=network) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"holdfast: {cause}")


def test_an_operators_key_without_keys_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert started(port=0, operator_key="root") == 2
    assert "--operator-key needs --keys or --api-key" in capsys.readouterr().err


def test_a_full_disk_is_not_said_to_be_an_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def full(*_: object) -> Any:
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(server, "opened", full)
    assert started(port=0) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "holdfast: the server cannot grow: no space is left on its disk"
    )
