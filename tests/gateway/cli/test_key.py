"""`holdfast key`: fresh keys and digests, in lines that the keys file takes."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from holdfast.gateway.access.auth import Keys
from holdfast.gateway.cli import main


def test_a_new_key_opens_with_its_line_in_either_form_of_the_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(main.app, ["key", "new", "acme"])
    assert result.exit_code == 0
    key, line = result.stdout.splitlines()
    assert line.split()[1] == "acme" and key not in line and len(key) > 40
    path = tmp_path / "keys"
    path.write_text(f"{line}\n")
    assert Keys.read(path).tenant(key) == "acme"
    assert f'keys = ["{line.split()[0]}"] below [tenants.acme]' in result.stderr
    assert CliRunner().invoke(main.app, ["key", "new", "acme"]).stdout.splitlines()[0] != key


def test_keys_that_there_are_get_their_lines(tmp_path: Path) -> None:
    result = CliRunner().invoke(main.app, ["key", "digest", "acme"], input="one\n\ntwo\n")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 2
    path = tmp_path / "keys"
    path.write_text(result.stdout)
    assert [Keys.read(path).tenant(key) for key in ("one", "two", "")] == ["acme", "acme", None]


def test_a_name_that_is_no_tenants_is_refused() -> None:
    for act in ("new", "digest"):
        result = CliRunner().invoke(main.app, ["key", act, "a b"], input="")
        assert result.exit_code == 2 and "'a b' is no name of a tenant" in result.stderr and not result.stdout
