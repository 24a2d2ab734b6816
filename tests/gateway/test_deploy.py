"""What `gateway/deploy/` holds fits the server: options, settings, routes, ports, and the time of a drain."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from starlette.routing import Route

from holdfast.gateway import __file__ as room
from holdfast.gateway.access.auth import PROBES
from holdfast.gateway.access.tenants import Tenants
from holdfast.gateway.app import build_app
from holdfast.gateway.service import Service
from holdfast.gateway.settings import DEFAULT_PORT, ClientLimits, GatewaySettings
from holdfast.tests.gateway.cli.test_configuration import SERVE, SETTINGS
from holdfast.tests.gateway.cli.test_main import invoke
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken

ROOT = Path(room).parents[1]
DEPLOY = ROOT / "gateway" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
OPTIONS = {name for param in SERVE.params for name in (*param.opts, *param.secondary_opts)}
VARIABLES = {f"HOLDFAST_{name.upper()}" for name in SETTINGS} | {"HOLDFAST_CONFIG", "HOLDFAST_CACHE"}
LIMITS = ClientLimits()
GOODBYES = 4 * LIMITS.close_seconds
"""The most seconds that a server takes to end after its drain: cut replies, sockets, sessions, HTTP."""


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((KUBERNETES / f"{name}.yaml").read_text())


def pod() -> dict[str, Any]:
    return manifest("deployment")["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    return only


def unit() -> dict[str, dict[str, list[str]]]:
    """The systemd unit: section, key, values."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in (DEPLOY / "holdfast.service").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        else:
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return found


def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line]  # type: ignore[misc]


def instruction(name: str) -> list[str]:
    return [value for kind, value in dockerfile() if kind == name]


def commands() -> dict[str, list[str]]:
    """The words of `holdfast` in each file, after its name."""
    (entry,), (default,) = instruction("ENTRYPOINT"), instruction("CMD")
    assert json.loads(entry) == ["holdfast"]
    (started,) = unit()["Service"]["ExecStart"]
    program, *words = shlex.split(started)
    assert Path(program).name == "holdfast"
    return {"Dockerfile": json.loads(default), "unit": words, "deployment": container()["args"]}


def routes() -> set[str]:
    app: Any = build_app(Service(GatewaySettings(), "scripted", Scripted(spoken, END)))
    while not hasattr(app, "routes"):
        app = next(value for name, value in vars(app).items() if name in ("app", "_app"))
    return {route.path for route in app.routes if isinstance(route, Route)}


def test_commands_have_options_that_exist() -> None:
    for file, words in commands().items():
        assert words[0] == "serve", file
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given <= OPTIONS, file


def test_variables_are_those_of_options() -> None:
    texts = [*instruction("ENV"), *unit()["Service"]["Environment"]]
    named = {word for text in texts for word in re.findall(r"\b(HOLDFAST_\w+)=", text)}
    assert {"HOLDFAST_STORE", "HOLDFAST_HOST"} <= named <= VARIABLES


@pytest.mark.parametrize(
    "path", [DEPLOY / "holdfast.toml", KUBERNETES / "holdfast.toml"], ids=["unit", "pod"]
)
def test_the_files_of_settings_are_accepted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    code, output = invoke("serve", "--config", str(path), "--print-config")
    assert code == 0, output
    commented = [line.removeprefix("# ") for line in path.read_text().splitlines() if " = " in line]
    assert {line.split(" = ")[0].replace("-", "_") for line in commented} <= set(SETTINGS)


def test_probes_ask_routes_that_answer_without_a_key() -> None:
    paths = {container()[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness")}
    (check,) = instruction("HEALTHCHECK")
    asked = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert asked == [(str(DEFAULT_PORT), "/health")]
    assert paths == {"/health", "/ready"} == set(PROBES) and paths <= routes()
    assert container()["livenessProbe"]["httpGet"]["path"] == "/health"


def test_ports_are_the_servers() -> None:
    (port,) = container()["ports"]
    assert instruction("EXPOSE") == [str(DEFAULT_PORT)]
    assert port["containerPort"] == DEFAULT_PORT == settings(KUBERNETES)["port"] == settings(DEPLOY)["port"]
    for probe in ("livenessProbe", "readinessProbe"):
        assert container()[probe]["httpGet"]["port"] == port["name"]
    (served,) = manifest("service")["spec"]["ports"]
    assert served["targetPort"] == port["name"]


def settings(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "holdfast.toml").read_text())


def test_a_drain_fits_the_time_that_it_is_given() -> None:
    sleep, seconds = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    needed = int(seconds) + settings(KUBERNETES)["drain-seconds"] + GOODBYES
    assert needed < pod()["terminationGracePeriodSeconds"]
    (stop,) = unit()["Service"]["TimeoutStopSec"]
    assert settings(DEPLOY)["drain-seconds"] + GOODBYES < int(stop)


def test_what_a_pod_mounts_is_there() -> None:
    volumes = {one["name"]: one for one in pod()["volumes"]}
    mounts = {one["name"]: one["mountPath"] for one in container()["volumeMounts"]}
    assert set(volumes) == set(mounts)
    generated = {one["name"]: one["files"] for one in manifest("kustomization")["configMapGenerator"]}
    assert generated == {volumes["config"]["configMap"]["name"]: ["holdfast.toml"]}
    assert volumes["store"]["persistentVolumeClaim"]["claimName"] == manifest("pvc")["metadata"]["name"]
    config, config_file = container()["args"][1:]
    assert config == "--config" and config_file == f"{mounts['config']}/holdfast.toml"
    assert Path(settings(KUBERNETES)["keys"]).parent == Path(mounts["keys"])
    assert Path(settings(KUBERNETES)["store"]).is_relative_to(mounts["store"])
    home = dict(re.findall(r"\b(\w+)=(\S+)", instruction("ENV")[0]))
    assert home["HOME"] == mounts["store"] == instruction("VOLUME")[0]
    assert Path(home["HOLDFAST_STORE"]).is_relative_to(home["HOME"])


def test_one_server_owns_the_store_and_its_labels_are_found() -> None:
    spec = manifest("deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate")
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == manifest("service")["spec"]["selector"]
    assert manifest("gpu")["metadata"]["name"] == manifest("deployment")["metadata"]["name"]
    (patched,) = manifest("gpu")["spec"]["template"]["spec"]["containers"]
    assert patched["name"] == container()["name"]
    listed = manifest("kustomization")["resources"]
    assert {f"{name}.yaml" for name in ("pvc", "deployment", "service")} == set(listed)
    assert pod()["enableServiceLinks"] is False, "HOLDFAST_PORT would be the service's"


def test_the_pod_and_the_unit_have_few_rights() -> None:
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert str(pod()["securityContext"]["runAsUser"]) == instruction("USER")[0]
    secured = container()["securityContext"]
    assert secured["readOnlyRootFilesystem"] and secured["capabilities"]["drop"] == ["ALL"]
    service = unit()["Service"]
    for key, value in (
        ("DynamicUser", "yes"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("CapabilityBoundingSet", ""),
        ("SystemCallFilter", "@system-service"),
    ):
        assert service[key] == [value]


def test_the_unit_reloads_on_sighup_and_gives_up_on_settings_that_cannot_work() -> None:
    service = unit()["Service"]
    assert service["ExecReload"] == ["/bin/kill -HUP $MAINPID"] and service["KillMode"] == ["mixed"]
    assert service["RestartPreventExitStatus"] == ["2"]
    assert {"Unit", "Service", "Install"} == set(unit())


def test_the_keys_that_the_manifests_tell_to_write_are_accepted(tmp_path: Path) -> None:
    text = (KUBERNETES / "kustomization.yaml").read_text()
    (example,) = re.findall(r"(?:^#   .*\n)+(?=#   kubectl create secret)", text, flags=re.MULTILINE)
    assert "--from-file=keys.toml" in text
    code, made = invoke("key", "new", "acme")
    (digest,) = re.findall(r"^(blake2b:\w+) acme$", made, flags=re.MULTILINE)
    assert code == 0 and example.count("blake2b:…") == 1
    file = tmp_path / Path(settings(KUBERNETES)["keys"]).name
    file.write_text(example.replace("#   ", "").replace("blake2b:…", digest))
    assert set(Tenants.read(file).keys.tenants.values()) == {"acme"}


def test_torch_and_triton_can_be_installed_together() -> None:
    """A CUDA build of torch asks for one version of triton, which need not be the newest."""
    asked = {"2.13.0": "3.7.1"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (torch,) = [line.removeprefix("torch==") for line in lines if line.startswith("torch==")]
    (triton,) = [Requirement(line) for line in lines if line.startswith("triton")]
    assert asked[torch] in triton.specifier


def test_the_image_is_built_from_what_the_repository_has() -> None:
    copied = [value.split()[0] for value in instruction("COPY") if not value.startswith("--from")]
    assert copied == [".", "constraints.txt"] and all((ROOT / name).exists() for name in copied)
    arguments = {value.split("=")[0] for value in instruction("ARG")}
    assert arguments == {"PYTHON", "TORCH_INDEX"}
    assert any("libgomp1" in value for value in instruction("RUN")), "the CPU kernels run on it"
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    needed = ("pyproject.toml", "README.md", "LICENSE", "gateway/deploy/Dockerfile")
    assert not [name for name in needed for pattern in ignored if fnmatch(name, pattern)]


def test_nginx_passes_what_the_server_takes() -> None:
    said = dict(re.findall(r"^ *(\w+) (\d+)[mh];", (DEPLOY / "nginx.conf.example").read_text(), re.MULTILINE))
    assert int(said["client_max_body_size"]) << 20 == LIMITS.body_bytes
    queued = GatewaySettings().max_queue_seconds
    assert int(said["proxy_read_timeout"]) * 3600 > queued, (
        "a turn may wait, and then says nothing until its end"
    )


def tool(*words: str) -> str:
    """What a tool prints about a file of ours; the test is skipped where the tool is not installed."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_kubectl_composes_the_manifests(tmp_path: Path) -> None:
    text = (KUBERNETES / "kustomization.yaml").read_text()
    patch = "# patches:\n#   - path: gpu.yaml\n"
    assert text.count(patch) == 1
    shutil.copytree(KUBERNETES, tmp_path, dirs_exist_ok=True)
    (tmp_path / "kustomization.yaml").write_text(
        text.replace(patch, patch.replace("# ", "").replace("#", ""))
    )
    for folder, gpus in ((KUBERNETES, None), (tmp_path, 1)):
        made = {one["kind"]: one for one in yaml.safe_load_all(tool("kubectl", "kustomize", str(folder)))}
        spec = made["Deployment"]["spec"]["template"]["spec"]
        assert spec["volumes"][0]["configMap"]["name"] == made["ConfigMap"]["metadata"]["name"] != "holdfast"
        assert spec["containers"][0]["image"] == "holdfast:latest"
        assert spec["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") == gpus


def test_prometheus_accepts_the_rules() -> None:
    assert "SUCCESS" in tool("promtool", "check", "rules", str(DEPLOY / "prometheus-alerts.yaml"))


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "holdfast.service").read_text()
    (started,) = unit()["Service"]["ExecStart"]
    for program in (started.split()[0], "/bin/kill"):
        text = text.replace(program, sys.executable)
    copy = tmp_path / "holdfast.service"
    copy.write_text(text)
    assert not tool("systemd-analyze", "verify", "--man=no", str(copy))
    measured = tool("systemd-analyze", "security", "--offline=true", "--threshold=20", str(copy))
    assert "holdfast.service" in measured


def test_the_wheel_has_every_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["holdfast.gateway"]
    names = [str(path.relative_to(Path(room).parent)) for path in FILES]
    assert len(names) > 10
    assert not [name for name in names if not any(Path(name).match(pattern) for pattern in patterns)]
    assert not [name for name in names if name.count("/") > 2]
