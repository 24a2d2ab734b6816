"""The harness: figures from rounds and requests, workers that fail, and the script that peers run by itself."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from holdfast.benchmarks.harness.options import CannotMeasure, Options
from holdfast.benchmarks.harness.rounds import agreeing, prompt, ratio, rotated, slope
from holdfast.benchmarks.harness.traffic import LoadPoint, Request, ResourceUsage
from holdfast.benchmarks.harness.workers import PEER_SCRIPT, Command, EngineWorker, commands, environment
from holdfast.benchmarks.peers.worker import FirstToken, read_safetensors
from holdfast.benchmarks.report import summary
from holdfast.benchmarks.toys import ASSISTANT, USER, ids_of, make_toy, teach, text_of
from holdfast.sessions.text.language import Language


def options(peers: Path, *, quick: bool = False) -> Options:
    return Options(("tiny",), 1, 0, "float32", 1, peers, peers, quick)


def worker_saying(answer: str) -> EngineWorker:
    program = f"import sys\nfor line in sys.stdin: {answer}"
    return EngineWorker(Command("it", (sys.executable, "-c", program)), threads=1)


def test_a_line_through_points() -> None:
    assert slope([0, 1, 2], [5.0, 7.0, 9.0]) == pytest.approx(2.0)
    assert slope([0, 1, 2, 3], [0.0, 1.0, 1.0, 0.0]) == pytest.approx(0.0)


def test_a_ratio_is_taken_within_rounds() -> None:
    assert ratio([1.0, 20.0, 3.0], [2.0, 10.0, 6.0]) == 0.5  # the slow minute was slow for both


def test_everyone_comes_first_once() -> None:
    assert [rotated("abc", by)[0] for by in range(4)] == ["a", "b", "c", "a"]
    assert sorted(rotated("abc", 5)) == ["a", "b", "c"]


def test_agreement_ends_with_the_first_difference() -> None:
    assert agreeing([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert agreeing([1, 2], [1, 2, 3]) == 2


def test_a_figure_has_all_its_runs() -> None:
    assert summary([3.0, 1.0, 2.0]) == {
        "median": 2.0,
        "p50": 2.0,
        "p90": 3.0,
        "p99": 3.0,
        "runs": [3.0, 1.0, 2.0],
    }


def test_a_toys_language_is_exact(tmp_path: Path) -> None:
    folder = teach(make_toy("tiny", tmp_path))
    language = Language.load(folder)
    tokens = prompt(random.Random(3), 40, 256)
    assert len(tokens) == 40 and (tokens[0], tokens[-1]) == (USER, ASSISTANT)
    assert language.tokenizer.encode(text_of(tokens), leads=True) == tokens
    assert language.tokenizer.encode(text_of(tokens), leads=False) == tokens
    assert ids_of(text_of(tokens)) == tokens
    assert not language.end_ids([])


def test_a_worker_answers_line_by_line() -> None:
    with worker_saying("print(line, end='', flush=True)") as worker:
        assert worker.ask("turn", out=3) == {"op": "turn", "out": 3}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("""print('{"error": "no such thing"}', flush=True)""", "it could not load: no such thing"),
        ("raise SystemExit('gone away')", "it ended: gone away"),
        ("raise SystemExit(3)", "it ended"),
    ],
)
def test_a_worker_that_fails_says_why(answer: str, told: str) -> None:
    with worker_saying(answer) as worker, pytest.raises(CannotMeasure, match=told):
        worker.ask("load")


def test_peers_are_found_where_make_put_them(tmp_path: Path) -> None:
    (tmp_path / "transformers" / "bin").mkdir(parents=True)
    (tmp_path / "transformers" / "ready").touch()
    names = ("holdfast", "transformers-kept", "openvino-genai")
    found, left_out = commands(names, options(tmp_path))
    assert [command.name for command in found] == ["holdfast", "transformers-kept"]
    assert found[1].words == (
        str(tmp_path / "transformers" / "bin" / "python"),
        str(PEER_SCRIPT),
        "transformers-kept",
    )
    assert list(left_out) == ["openvino-genai"] and "make peers" in left_out["openvino-genai"]
    assert set(commands(names, options(tmp_path, quick=True))[1]) == {"transformers-kept", "openvino-genai"}


def test_peers_do_not_see_our_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    assert "PYTHONPATH" not in environment(2, ours=False)
    ours = environment(2, ours=True)
    assert (ours["PYTHONPATH"], ours["OMP_NUM_THREADS"], ours["GOMP_SPINCOUNT"]) == (
        "somewhere",
        "2",
        "20000",
    )


def test_the_peers_script_needs_nothing_of_ours() -> None:
    imports = [
        node for node in ast.walk(ast.parse(PEER_SCRIPT.read_text())) if isinstance(node, ast.ImportFrom)
    ]
    assert not [node.module for node in imports if node.level or (node.module or "").startswith("holdfast")]
    done = subprocess.run(
        [sys.executable, "-I", str(PEER_SCRIPT), "transformers"],
        input='{"op": "turn", "tokens": [1]}\n',
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {"error": "KeyError: 'out'"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_read_without_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    wanted = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    save_file({"a.weight": wanted, "b": torch.ones(2, dtype=dtype)}, tmp_path / "it.safetensors")
    found = dict(read_safetensors(tmp_path / "it.safetensors"))
    assert np.array_equal(found["a.weight"], wanted.float().numpy())
    assert np.array_equal(found["b"], np.ones(2))


def test_the_first_token_is_the_first_after_what_is_skipped() -> None:
    first = FirstToken(skip=1)
    first.put("prompt")
    assert first.at == 0.0
    first.put(7)
    at = first.at
    first.put(8)
    assert first.at == at > 0.0


def test_serving_figures_of_a_phase() -> None:
    phase = LoadPoint("it", 2.0, used=ResourceUsage(4.0, 0.5, 2.0, 0.1))
    phase.take([Request(10.0, [10.5, 10.6, 11.0], 11.0, 3), Request(11.0, [11.25], 11.25, 1)])
    phase.take([Request(12.0, [], 12.5, 0, failed="no")])
    told = phase.told()
    assert (told["turns"], told["completed"], told["failed"]) == (2, 2, ["no"])
    assert told["request_throughput"] == 0.5 and told["output_throughput"] == 1.0
    assert told["median_ttft_ms"] == pytest.approx(375.0) and told["p99_ttft_ms"] == pytest.approx(500.0)
    assert told["mean_itl_ms"] == pytest.approx(250.0) and told["mean_tpot_ms"] == pytest.approx(250.0)
    assert told["mean_e2el_ms"] == pytest.approx(625.0)
    assert told["gateway"]["microseconds_per_event"] == pytest.approx(1e6 * 0.5 / 4)
    assert told["engine"]["cores"] == 0.5
