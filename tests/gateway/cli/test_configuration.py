"""Settings of `serve`: flag before environment before file before default; wrong ones in one line."""

from __future__ import annotations

import re
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer.main

from holdfast.gateway.cli import main
from holdfast.gateway.cli.configuration import NO_SETTINGS
from holdfast.gateway.cli.vllm_names import HINTS
from holdfast.runtime.settings import EngineSettings
from holdfast.tests.gateway.cli.test_main import invoke

SERVE = typer.main.get_command(main.app).commands["serve"]  # type: ignore[attr-defined]
SETTINGS = {param.name: param for param in SERVE.params if param.name not in NO_SETTINGS}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `serve` would have run with."""
    calls: list[Any] = []
    monkeypatch.setattr("holdfast.gateway.cli.serve.run", lambda *given: calls.append(given[:2]) or 0)
    monkeypatch.setattr("holdfast.runtime.link.child.spawned_early", nullcontext)
    for name in SETTINGS:
        monkeypatch.delenv(f"HOLDFAST_{name.upper()}", raising=False)
    return calls


def written(folder: Path, text: str) -> str:
    path = folder / "holdfast.toml"
    path.write_text(text)
    return str(path)


def test_flag_before_environment_before_file_before_default(served: list[Any], tmp_path: Path) -> None:
    path = written(tmp_path, 'model = "pocket"\nport = 1\nmax_sequences = 11\nmax_context = 111\n')
    words = ("serve", "--no-store", "--config", path)
    assert invoke(*words, "--port", "3", HOLDFAST_PORT="2", HOLDFAST_MAX_SEQUENCES="22")[0] == 0
    gateway, engine = served[0]
    assert (gateway.port, engine.max_sequences, engine.max_context) == (3, 22, 111)
    assert engine.max_step_tokens == EngineSettings(model="").max_step_tokens


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_has_a_variable(served: list[Any], name: str) -> None:
    """A value that the variable cannot mean is told of, so it was read."""
    if (samples := VARIABLES.get(name)) is not None:
        variables = {"HOLDFAST_SSL_CERTFILE": "/some/cert", "HOLDFAST_ENABLE_LORA": "1"}
        variables[f"HOLDFAST_{name.upper()}"] = samples
        _, told = invoke("serve", *(["pocket"] if name != "model" else []), "--print-config", **variables)
        assert f"# HOLDFAST_{name.upper()}\n" in told, told
        return
    code, told = invoke("serve", "pocket", **{f"HOLDFAST_{name.upper()}": "☃"})
    assert code == 2 and told.startswith(f"holdfast: HOLDFAST_{name.upper()}: ") and told.count("\n") == 1


TEXTS = ("model", "host", "api_key", "keys", "device", "policy", "store", "operator_key", "ssl_certfile")
VARIABLES = dict.fromkeys(TEXTS, "word") | {
    **dict.fromkeys(("kv_bytes", "host_bytes", "disk_bytes"), "1GiB"),
    "kv_scales": "1,0.5",
    "cudagraph_capture_sizes": "1 2 8",
    "served_model_name": "one two",
    "allowed_host": "a.example b.example",
    "allow_origin": "https://a.example",
    "trusted_proxies": "10.0.0.0/8",
    "root_path": "/there",
    "ssl_keyfile_password": "hush",
    "ssl_keyfile": "/some/key",
    "lora_folder": "/some/where",
    "lora_modules": "one=/some/where two=/else/where",
    "otlp_traces_endpoint": "http://localhost:4318",
}


def test_every_option_has_a_help_and_a_group() -> None:
    bare = [name for name, param in SETTINGS.items() if name != "model" and not param.help]
    assert not bare, f"a text below the field is its help: {bare}"
    told = invoke("serve", "--help")[1]
    assert re.findall(r"Options: (\w+)", told) == ["gateway", "network", "engine", "log"]


def test_the_doctor_takes_the_options_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("holdfast.gateway.cli.doctor.run", lambda settings, keys: asked.append(settings) or 0)
    words = ("--block-tokens", "32", "--kv-bytes", "1GiB", "--dtype", "half", "--kv-scales", "1,0.5")
    assert invoke("doctor", "pocket", *words)[0] == 0 == invoke("doctor")[0]
    settings = EngineSettings(
        model="pocket", block_tokens=32, kv_bytes=1 << 30, dtype="float16", kv_scales=(1.0, 0.5)
    )
    assert asked == [settings, None]
    code, told = invoke("doctor", "pocket", "--kv-bytes", "lots")
    assert (code, told) == (2, "holdfast: --kv-bytes 'lots' is not a size such as 512MiB or 8GiB\n")


def test_a_file_may_hold_the_model_lists_and_flags(served: list[Any], tmp_path: Path) -> None:
    text = 'model = "pocket"\nserved-model-name = ["a", "b"]\nallowed_host = "c.example"\nno-store = true\n'
    assert (
        invoke("serve", "--config", written(tmp_path, text + "end_cycles = false\nhost_bytes = 0\n"))[0] == 0
    )
    gateway, engine = served[0]
    assert (gateway.served_names, gateway.network.allowed_hosts) == (("a", "b"), ("c.example",))
    assert (gateway.store, gateway.cycle_tokens, engine.host_bytes, engine.model) == (None, 0, 0, "pocket")


def test_the_file_may_be_named_by_the_environment(served: list[Any], tmp_path: Path) -> None:
    path = written(tmp_path, 'model = "pocket"\nport = 5\n')
    assert invoke("serve", HOLDFAST_CONFIG=path)[0] == 0
    assert served[0][0].port == 5


def test_lists_of_the_environment_are_separated_by_blanks(served: list[Any]) -> None:
    assert invoke("serve", "pocket", HOLDFAST_SERVED_MODEL_NAME="a b")[0] == 0
    assert served[0][0].served_names == ("a", "b")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot = 1\n", "prot is no setting: do you mean port?"),
        ("zzzz = 1\n", "zzzz is no setting: holdfast serve --help lists the options"),
        (
            "swap-space = 4\n",
            "swap-space is no setting: --host-bytes sizes the KV below the device",
        ),
        ("config = 'other.toml'\n", "config is no setting"),
        ("[serve]\nport = 1\n", "serve is no setting"),
        ("port = 'eighty'\n", "port: Expected `int`, got `str`"),
        ("port = true\n", "port: Expected `int`, got `bool`"),
        ("port = 1.5\n", "port: Expected `int`, got `float`"),
        ("port = 70000\n", "port: "),
        ("no_store = 'yes'\n", "no_store: Expected `bool`, got `str`"),
        ("dtype = 'float33'\n", "dtype: "),
        ("dtype = 32\n", "dtype: Expected `str`, got `int`"),
        ("allowed_host = [1]\n", "allowed_host: Expected `str`, got `int`"),
        ("port = 1\nport = 2\n", "at line 2"),
        ("max-context = 8\nmax_model_len = 8\n", "max_model_len: this setting is there twice"),
        ("port = \n", "at line 1"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_with_the_file(
    served: list[Any], tmp_path: Path, text: str, told: str
) -> None:
    path = written(tmp_path, text)
    code, output = invoke("serve", "pocket", "--config", path)
    assert code == 2 and not served
    assert output.startswith(f"holdfast: {path}: ") and told in output and output.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("kv_bytes = 'lots'\n", "kv_bytes"),
        ("kv_bytes = 0\n", "kv_bytes"),
        ("kv_scales = '1,3'\n", "kv_scales"),
        ("allowed_host = 'http://a.example'\n", "allowed_host"),
        ("root_path = 'holdfast'\n", "root_path"),
        ("otlp_traces_endpoint = 'localhost:4318'\n", "otlp_traces_endpoint"),
        ("served_model_name = 'two words'\n", "served_model_name"),
        ("ssl_keyfile = '/some/key'\n", "ssl_keyfile"),
        ("keys = '/some/keys'\napi_key = 'k'\n", "keys"),
    ],
)
def test_a_value_that_no_settings_can_be_made_of_names_file_and_key(
    served: list[Any], tmp_path: Path, text: str, key: str
) -> None:
    path = written(tmp_path, text)
    code, output = invoke("serve", "pocket", "--config", path)
    assert code == 2 and not served
    assert f"{path}: {key}" in output and output.count("\n") == 1


def test_a_file_that_cannot_be_read_is_refused(served: list[Any], tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        code, output = invoke("serve", "pocket", "--config", str(path))
        assert code == 2 and output.startswith(f"holdfast: {path}: ") and output.count("\n") == 1


def test_a_variable_of_a_container_platform_is_refused_by_its_name(served: list[Any]) -> None:
    """Kubernetes sets HOLDFAST_PORT like this beside a service named holdfast."""
    code, output = invoke("serve", "pocket", HOLDFAST_PORT="tcp://10.0.0.1:8040")
    assert code == 2 and output.startswith("holdfast: HOLDFAST_PORT: ") and output.count("\n") == 1


def test_print_config_shows_each_setting_with_its_source(served: list[Any], tmp_path: Path) -> None:
    path = written(tmp_path, "max_context = 512\n")
    words = ("serve", "pocket", "--config", path, "--port", "9", "--print-config")
    code, output = invoke(*words, HOLDFAST_API_KEY="s3cret", HOLDFAST_MAX_SEQUENCES="3")
    assert code == 0 and not served
    lines = output.splitlines()
    assert f"max_context = 512  # {path}" in lines and "port = 9  # command line" in lines
    assert "max_sequences = 3  # HOLDFAST_MAX_SEQUENCES" in lines and 'host = "127.0.0.1"  # default' in lines
    assert "s3cret" not in output and "# api_key is set, and not shown  # HOLDFAST_API_KEY" in lines
    assert {re.split(r" (?:=|is) ", line.removeprefix("# "))[0] for line in lines} == set(SETTINGS)


def test_what_is_printed_can_be_read_again(served: list[Any], tmp_path: Path) -> None:
    words = ("pocket", "--served-model-name", 'a"b', "--kv-bytes", "1GiB", "--store", str(tmp_path / "kept"))
    first = invoke("serve", *words, "--no-end-cycles", "--print-config")[1]
    assert tomllib.loads(first)["kv_bytes"] == "1GiB"
    again = invoke("serve", "--config", written(tmp_path, first), "--print-config")[1]
    assert tomllib.loads(first) == tomllib.loads(again)


def test_a_wrong_setting_is_refused_before_any_is_printed(served: list[Any]) -> None:
    code, output = invoke("serve", "pocket", "--kv-bytes", "lots", "--print-config")
    assert code == 2 and output == "holdfast: --kv-bytes 'lots' is not a size such as 512MiB or 8GiB\n"


def test_options_have_the_names_of_vllm_where_they_mean_the_same(served: list[Any]) -> None:
    words = "serve pocket --no-store --max-model-len 100 --max-num-seqs 8 --max-num-batched-tokens 64"
    words += " --block-size 32 --kv-cache-memory-bytes 1GiB --kv-cache-dtype fp8 --dtype half"
    assert invoke(*words.split())[0] == 0
    assert served[0][1] == EngineSettings(
        model="pocket",
        max_context=100,
        max_sequences=8,
        max_step_tokens=64,
        block_tokens=32,
        kv_bytes=1 << 30,
        kv_dtype="float8_e4m3fn",
        dtype="float16",
    )


@pytest.mark.parametrize("option", sorted(HINTS))
def test_an_option_of_vllm_without_a_meaning_is_refused_with_a_hint(served: list[Any], option: str) -> None:
    for words in ([option], [f"{option}=1"], [option, "1"]):
        code, output = invoke("serve", "pocket", *words)
        assert code == 2 and not served
        assert output == f"holdfast: {option}: {HINTS[option]}\n"


def test_hints_name_options_that_exist() -> None:
    known = {name for param in SERVE.params for name in (*param.opts, *param.secondary_opts)}
    assert not known & set(HINTS)
    named = {name for text in HINTS.values() for name in re.findall(r"--[\w-]+", text)}
    assert named <= known
