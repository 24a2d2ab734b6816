"""A journal that is not the one of the last start: probe and metrics say so, and the server is ready."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import msgspec
import pytest

from holdfast.gateway.metrics.prometheus import MetricsSnapshot, exposition
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.settings import JournalSettings
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, WORDS, Scripted
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio
NUMBERS = JournalSettings(reserve_bytes=0)


async def test_a_mismatch_is_told_by_the_probe_and_the_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await (await Journal.open(tmp_path, b"model", NUMBERS)).aclose()
    shutil.rmtree(tmp_path / "journal")
    caplog.set_level(logging.WARNING)
    for gone in (True, False):
        link = Scripted(lambda tokens: WORDS[len(tokens) % len(WORDS)], END, ahead=1)
        service = Service(GatewaySettings(), "scripted", link)
        journal = await Journal.open(tmp_path, b"model", NUMBERS)
        service.open(SessionRegistry(link, Language.of(ours("chatml")), None, journal), journal)
        try:
            state = service.state()
            figures = exposition(MetricsSnapshot(True, 1, await journal.statistics(), {}))
            assert state.ready
            assert f"holdfast_journal_mismatch {float(gone)}".encode() in figures
            if not gone:
                assert "journal" not in msgspec.to_builtins(state)
                continue
            (line,) = state.journal
            assert "gone or empty" in line and line in caplog.messages
        finally:
            await service.close()
            await journal.aclose()
