"""The dashboard and the alert rules name metrics that a server really exposes."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.gateway import __file__ as room
from holdfast.gateway.embedded import in_memory
from holdfast.gateway.metrics.prometheus import exposition
from holdfast.gateway.service import Service, opened
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.thread import ThreadEngine

pytestmark = pytest.mark.anyio
DEPLOY = Path(room).parent / "deploy"
NAME = re.compile(r"(?:holdfast_|vllm:)\w+")
QUERY = re.compile(r"^\| [^|]+ \| `([^`]*holdfast_[^`]*)` \|$", re.MULTILINE)
"""The queries of the operators' guide: each is alone in its cell of a table of two columns."""
PROMETHEUS = {"up"}
"""Metrics of Prometheus itself."""


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana-dashboard.json").read_text())


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus-alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (rule["expr"] for rule in rules())
    yield from QUERY.findall((DEPLOY.parent / "README.md").read_text())


@pytest.fixture
async def exposed(tmp_path: Path) -> AsyncIterator[set[str]]:
    """The names of all samples of a server with a store, and of the labels that each has."""
    store = EngineSettings(model="pocket", store=str(tmp_path), host_bytes=1 << 24)
    engine = ThreadEngine(store)
    service = Service(GatewaySettings(store=tmp_path, metrics_compat="vllm"), "pocket", engine.link)
    async with opened(service, "pocket", engine), in_memory(service).session() as chat:
        await chat.say("Hello!").text()
        yield set(_samples(exposition(await service.snapshot()).decode()))


def _samples(text: str) -> Iterator[str]:
    """The names of samples; a family without samples yet has those that its type gives."""
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            yield from (name + end for end in ends)
        elif not line.startswith("#"):
            yield re.split(r"[{ ]", line)[0]


async def test_every_metric_that_is_named_is_exposed(exposed: set[str]) -> None:
    named = {name for text in expressions() for name in NAME.findall(text)}
    assert len(named) > 30 and named <= exposed, sorted(named - exposed)


def test_every_expression_names_a_metric_and_labels_that_exist() -> None:
    labels = {
        "instance",
        "job",
        "le",
        "status",
        "reason",
        "code",
        "tier",
        "class",
        "tenant",
        "protocol",
        "route",
    }
    for text in expressions():
        assert NAME.search(text) or text.split("{")[0] in PROMETHEUS, text
        selectors = re.findall(r"\{([^}]*)\}", text)
        found = {part.split("=")[0].strip("~! ") for one in selectors for part in one.split(",") if part}
        assert found <= labels, text
        assert text.count("(") == text.count(")")


def test_the_dashboard_can_be_imported() -> None:
    panels = dashboard()["panels"]
    numbers = [panel["id"] for panel in panels]
    assert len(set(numbers)) == len(numbers) > 10
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24, "panels overlap"
    assert all(panel["type"] == "row" or panel["targets"] for panel in panels)
    variables = {one["name"] for one in dashboard()["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard()))) <= variables | {"__rate_interval", "__all"}


def test_alerts_have_what_alertmanager_shows() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+m", rule.get("for", "1m"))
