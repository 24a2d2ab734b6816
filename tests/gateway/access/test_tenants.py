"""The keys file that sets limits: what it may say, what each room gets of it, and sums that do not fit."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest

from holdfast.gateway.access.auth import salt_of
from holdfast.gateway.access.quotas import CLIENT_QUOTAS, TENANT_QUOTAS
from holdfast.gateway.access.tenants import Allowance, Tenants, amount, check, check_loaded, told
from holdfast.gateway.cli import doctor
from holdfast.gateway.cli.serve import run
from holdfast.gateway.errors import KeysUnusable, LimitsTooLarge, wire_error
from holdfast.gateway.settings import ClientLimits, GatewaySettings
from holdfast.runtime.link.messages import Hello
from holdfast.runtime.settings import EngineSettings, TenantBudget
from holdfast.sessions.settings import UNLIMITED, JournalShare, TenantLimits

MIB = 1 << 20
ENGINE = EngineSettings(model="pocket", device="cpu", kv_bytes=64 * MIB, max_sequences=16)
HELLO = Hello("pocket", "cpu", "float32", 100, (1,), 512, 16, 64, MIB, 1000)
TWO = """
[limits]
sessions = 100          # of each tenant
turns = 8

[tenants.acme]
keys = ["alpha", "beta"]
leased = "16MiB"
disk = "1.5 GiB"

[tenants.zenith]
keys = ["gamma"]
sessions = 10
kept = 20
journal = 8388608

[tenants.free]
keys = ["delta"]
"""


def written(folder: Path, text: str, name: str = "tenants.toml") -> Tenants:
    path = folder / name
    path.write_text(text)
    return Tenants.read(path)


def asking(folder: Path, **limits: dict[str, int]) -> Tenants:
    """Tenants with these limits."""
    lines = [
        f'[tenants.{name}]\nkeys = ["{name}-key"]\n' + "".join(f"{kind} = {n}\n" for kind, n in one.items())
        for name, one in limits.items()
    ]
    return written(folder, "\n".join(lines))


def test_each_tenant_has_its_own_limits_and_the_usual_ones(tmp_path: Path) -> None:
    found = written(tmp_path, TWO)
    assert found.keys is not None
    assert [found.keys.tenant(key) for key in ("alpha", "beta", "gamma", "other")] == [
        "acme",
        "acme",
        "zenith",
        None,
    ]
    assert found.limits["acme"] == Allowance(sessions=100, turns=8, leased=16 * MIB, disk=1536 * MIB)
    assert found.limits["zenith"] == Allowance(sessions=10, kept=20, turns=8, journal=8 * MIB)
    assert found.limits["free"] == Allowance(sessions=100, turns=8)


def test_each_room_gets_its_part(tmp_path: Path) -> None:
    found = written(tmp_path, TWO)
    acme, zenith, free = map(salt_of, ("acme", "zenith", "free"))
    assert found.sessions() == {
        acme: TenantLimits(100, 8),
        zenith: TenantLimits(10, 8),
        free: TenantLimits(100, 8),
    }
    assert found.journal()[zenith] == JournalShare(20, 8 * MIB)
    assert found.journal()[acme] == JournalShare(UNLIMITED, UNLIMITED)
    assert found.budgets() == (TenantBudget(salt=acme, leased_bytes=16 * MIB, disk_bytes=1536 * MIB),)
    assert (found.name(zenith), found.name(b"")) == ("zenith", "")


def test_operators_are_named_in_the_file_or_by_an_option(tmp_path: Path) -> None:
    found = written(tmp_path, '[operators]\nkeys = ["root", "alpha"]\n' + TWO).keys
    assert found is not None and found.tenant("root") is None and found.tenant("alpha") == "acme"
    assert [found.is_operator(key) for key in ("root", "alpha", "beta")] == [True, True, False]
    both = Tenants.of(GatewaySettings(keys=tmp_path / "tenants.toml", operator_key="ops")).keys
    assert both is not None and both.is_operator("root") and both.is_operator("ops")
    lines = tmp_path / "keys"
    lines.write_text("alpha acme\n")
    found = Tenants.of(GatewaySettings(keys=lines, operator_key="root")).keys
    assert found is not None and [found.is_operator(key) for key in ("root", "alpha")] == [True, False]
    for settings, sees in (
        (GatewaySettings(api_key="one"), True),
        (GatewaySettings(api_key="one", operator_key="root"), False),
    ):
        found = Tenants.of(settings).keys
        assert found is not None and found.is_operator("one") is sees


def test_the_form_of_lines_sets_no_limits(tmp_path: Path) -> None:
    found = written(tmp_path, "alpha acme\nbeta zenith  # another\n", "keys")
    assert found.keys is not None and found.keys.tenant("beta") == "zenith"
    assert found.limits == {} and found.budgets() == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it has no keys"),
        ("[tenants.acme]\nsessions = 1\n", "it has no keys"),
        ("[tenants.acme\n", "line 1"),
        ('[tenants.acme]\nkeys = ["s3cret"]\nseats = 4\n', "seats"),
        ('[tenants.acme]\nkeys = "s3cret"\n', "Expected `array`"),
        ('[tenants.acme]\nkeys = ["s3cret"]\nsessions = 1.5\n', "Expected `int | null`"),
        (
            '[tenants.acme]\nkeys = ["s3cret"]\nsessions = 0\n',
            r"\[tenants.acme\]: sessions = 0 is less than 1",
        ),
        ('[tenants.acme]\nkeys = ["s3cret"]\ndisk = "much"\n', "'much' is not a size"),
        ("[limits]\nturns = -1\n", r"\[limits\]: turns = -1 is less than 1"),
        ('[tenants.acme]\nkeys = ["s3cret"]\nsessions = 9\nkept = 8\n', "kept = 8 is less than sessions = 9"),
        (
            '[limits]\nsessions = 9\n[tenants.a]\nkeys = ["s3cret"]\nkept = 8\n',
            r"\[tenants.a\]: kept = 8 is less",
        ),
        ('[tenants."ten/ant"]\nkeys = ["s3cret"]\n', "'ten/ant' is no name"),
        ('[tenants.a]\nkeys = ["s3cret"]\n[tenants.b]\nkeys = ["s3cret"]\n', r"of \[tenants.b\] is another"),
        ('[tenants.acme]\nkeys = ["s3cret s3cret"]\n', "is empty, or has blanks"),
        ('[tenants.acme]\nkeys = [""]\n', "is empty, or has blanks"),
        (
            '[operators]\nkeys = ["s3cret s3cret"]\n[tenants.acme]\nkeys = ["x"]\n',
            r"a key of \[operators\] is empty, or has blanks",
        ),
        ('[operators]\nkeys = ["s3cret"]\n', "it has no keys"),
        (f'[tenants.acme]\nkeys = ["s3cret"]\ndisk = "{"9" * 400}"\n', "more bytes than any machine has"),
        (f"a = {'[' * 5000}\n", "recursion"),
    ],
)
def test_an_invalid_limit_is_refused_by_its_place_without_showing_a_key(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(KeysUnusable, match=told) as refused:
        written(tmp_path, text)
    assert refused.value.message.startswith(str(tmp_path)) and "s3cret" not in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("limit", "alone", "told"),
    [
        ("sessions", 10_000, "sessions of {} is 1 more than sessions that may be open, 10,000"),
        ("kept", 100_000, "kept of {} is 1 more than sessions that the journal keeps, 100,000"),
        ("journal", 4096 * MIB, "journal of {} is 1 B more than what the journal may have, 4.0 GiB"),
        ("disk", 256 * MIB, "disk of {} is 1 B more than --disk-bytes, 256 MiB"),
        (
            "leased",
            32 * MIB,
            "leased of {} is 1 B more than what leases may cover, 0.5 × 64 MiB of KV, 32 MiB",
        ),
    ],
)
def test_a_limit_and_a_sum_of_limits_must_fit_the_server(
    tmp_path: Path, limit: str, alone: int, told: str
) -> None:
    engine = EngineSettings(model="pocket", kv_bytes=64 * MIB, disk_bytes=256 * MIB)
    settings = GatewaySettings()
    check(asking(tmp_path, acme={limit: alone - 1}, zenith={limit: 1}, free={}), settings, engine)
    with pytest.raises(LimitsTooLarge) as single:
        check(asking(tmp_path, acme={limit: alone + 1}), settings, engine)
    tell = amount(limit)
    assert told.format(f"acme {tell(alone + 1)}") in single.value.message
    with pytest.raises(LimitsTooLarge) as summed:
        check(asking(tmp_path, acme={limit: alone - 1}, zenith={limit: 2}), settings, engine)
    written_out = f"acme {tell(alone - 1)} + zenith {tell(2)} = {tell(alone + 1)}"
    assert told.format(written_out) in summed.value.message


def test_replies_alternate_so_that_only_one_tenants_number_counts(tmp_path: Path) -> None:
    check(asking(tmp_path, acme={"turns": 16}, zenith={"turns": 16}), GatewaySettings(), ENGINE)
    with pytest.raises(LimitsTooLarge, match="turns of acme 17 is 1 more than --max-sequences, 16"):
        check(asking(tmp_path, acme={"turns": 17}), GatewaySettings(), ENGINE)


@pytest.mark.parametrize("limit", ["disk", "journal"])
def test_limits_must_fit_the_disk(tmp_path: Path, limit: str) -> None:
    vast = replace(GatewaySettings().journal, max_bytes=1 << 62)
    settings = GatewaySettings(store=tmp_path / "not" / "yet", journal=vast)
    with pytest.raises(LimitsTooLarge, match=f"{limit} of acme .* more than the store's disk"):
        check(asking(tmp_path, acme={limit: 1 << 60}), settings, ENGINE)


def test_of_many_the_largest_are_named(tmp_path: Path) -> None:
    many = asking(tmp_path, **{f"t{n}": {"sessions": 1000 * n} for n in range(1, 7)})
    with pytest.raises(
        LimitsTooLarge, match=r"t6 6,000 [+] t5 5,000 [+] t4 4,000 [+] 3 others 6,000 = 21,000 is 11,0"
    ):
        check(many, GatewaySettings(), ENGINE)


def test_leases_must_fit_the_loaded_kv(tmp_path: Path) -> None:
    check_loaded(asking(tmp_path, acme={"leased": 32 * MIB}), ENGINE, HELLO)
    with pytest.raises(LimitsTooLarge, match=r"acme 20 MiB [+] zenith 20 MiB = 40 MiB is 8 MiB more"):
        check_loaded(asking(tmp_path, acme={"leased": 20 * MIB}, zenith={"leased": 20 * MIB}), ENGINE, HELLO)


def test_turns_must_fit_the_rows_of_the_loaded_engine(tmp_path: Path) -> None:
    """By default the device decides how many there are."""
    usual = msgspec.structs.replace(ENGINE, max_sequences=None)
    check(asking(tmp_path, acme={"turns": 65}), GatewaySettings(), usual)
    with pytest.raises(LimitsTooLarge, match="turns of acme 65 is 1 more than --max-sequences, 64"):
        check_loaded(asking(tmp_path, acme={"turns": 65}), usual, HELLO)
    assert doctor.run(usual, tmp_path / "tenants.toml") == 2


def test_a_server_does_not_start_with_limits_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asking(tmp_path, acme={"turns": 17})
    assert run(GatewaySettings(port=0, keys=tmp_path / "tenants.toml"), ENGINE) == 2
    told = capsys.readouterr().err
    assert told.startswith("holdfast: ") and told.count("\n") == 1
    assert "turns of acme 17 is 1 more than --max-sequences, 16" in told
    assert wire_error(LimitsTooLarge("")).code == "keys_unusable"


def test_doctor_shows_the_limits_and_checks_them_with_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, TWO)
    shown = dict(doctor.limits(Tenants.read(tmp_path / "tenants.toml")))
    assert shown["acme"].startswith("2 keys; 100 sessions open, 8 replies at once, 16 MiB leased, 1.5 GiB")
    assert shown["zenith"].startswith("1 key; 10 sessions open, 20 kept")
    assert doctor.run(None, tmp_path / "tenants.toml") == 0
    asking(tmp_path, acme={"leased": 33 * MIB}, zenith={"leased": MIB})
    assert doctor.run(ENGINE, tmp_path / "tenants.toml") == 2
    assert "acme 33 MiB + zenith 1 MiB = 34 MiB is 2 MiB more" in capsys.readouterr().err


def test_every_limit_is_shown() -> None:
    assert told(Allowance()) == "no limits"
    limits = [field.name for field in fields(Allowance)]
    words = told(Allowance(**dict.fromkeys(limits, 7))).split(", ")
    assert len(words) == len(limits) and all("7" in word for word in words)


def test_the_table_of_quotas_has_all_limits() -> None:
    assert [field.name for field in fields(Allowance)] == [quota.name for quota in TENANT_QUOTAS]
    assert all(hasattr(ClientLimits(), quota.name) for quota in CLIENT_QUOTAS)
    for quota in (*TENANT_QUOTAS, *CLIENT_QUOTAS):
        assert quota.error is None or quota.code == wire_error(quota.error.__new__(quota.error)).code
