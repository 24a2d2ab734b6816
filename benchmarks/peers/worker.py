"""Another engine (a "peer") as a worker process: JSON lines in, JSON lines out. Runs as a file under the peer's
own Python.

Imports nothing of ours, so that it runs in the peer's environment. Our engine answers the same requests
(`benchmarks.harness.ours`), with `answer_all` of this file.

    {"op": "load", "folder": ..., "dtype": ..., "threads": 2}  -> {"versions": ..., "precision": ...}
    {"op": "begin"}                                            -> {}      a new conversation
    {"op": "turn", "tokens": [...], "out": 32}                 -> {"ttft_ms", "seconds", "tokens"}
    {"op": "decode", "prompts": [[...]], "out": 128}           -> {"seconds", "tokens"}
    {"op": "prefill", "tokens": [...]}                         -> {"seconds"}   to the first token

A request that fails is answered {"error": text}; the worker ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

Json = dict[str, Any]


class PeerEngine(Protocol):
    """The interface of an engine that a worker drives, with one conversation. Token ids in and out; times in
    seconds."""

    def load(self, folder: Path, dtype: str, threads: int) -> Json:
        """Load the model in ``folder``. Returns its versions and precision, as JSON values."""

    def begin(self) -> None:
        """Forget the conversation, so that the next turn begins a new one."""

    def turn(self, tokens: list[int], out: int) -> tuple[float, list[int]]:
        """Append tokens to the conversation and generate exactly ``out``. Returns the seconds to the first one,
        and the generated tokens."""

    def decode(self, prompts: list[list[int]], out: int) -> int:
        """Generate exactly ``out`` tokens after each prompt, all prompts at once. Returns how many were
        generated in all."""


def answer_all(engine: PeerEngine, more: dict[str, Callable[[Json], Json]] | None = None) -> None:
    """Answer requests with this engine until standard input ends. ``more``: further operations by name. What
    libraries print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    operations = {**_operations(engine), **(more or {})}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = operations[request["op"]](request)
        except Exception as fault:  # whatever a peer raises is what it answers
            reply = {"error": f"{type(fault).__name__}: {fault}"}
        replies.write(json.dumps(reply) + "\n")


def _operations(engine: PeerEngine) -> dict[str, Callable[[Json], Json]]:
    def begin(request: Json) -> Json:
        engine.begin()
        return {}

    def turn(request: Json) -> Json:
        began = time.perf_counter()
        first, tokens = engine.turn(request["tokens"], request["out"])
        return {"ttft_ms": 1000 * first, "seconds": time.perf_counter() - began, "tokens": tokens}

    def decode(request: Json) -> Json:
        began = time.perf_counter()
        tokens = engine.decode(request["prompts"], request["out"])
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    def prefill(request: Json) -> Json:
        engine.begin()
        first, _ = engine.turn(request["tokens"], 1)
        return {"seconds": first}

    return {
        "load": lambda request: engine.load(Path(request["folder"]), request["dtype"], request["threads"]),
        "begin": begin,
        "turn": turn,
        "decode": decode,
        "prefill": prefill,
    }


class FirstToken:
    """Records when the first token came (``at``, by ``time.perf_counter()``; 0.0 before). It has the methods of
    transformers' streamers. ``skip``: how many calls come before it that are no generated tokens."""

    def __init__(self, skip: int) -> None:
        self._skip = skip
        self.at = 0.0

    def put(self, value: Any) -> None:
        """Called with each new token."""
        if self._skip:
            self._skip -= 1
        elif not self.at:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Called at the end; does nothing."""


class Resent(ABC):
    """Base of the peers that get the whole history with each turn; a peer's own cache may spare some of it."""

    def __init__(self) -> None:
        self._history: list[int] = []

    def begin(self) -> None:
        self._history = []

    def turn(self, tokens: list[int], out: int) -> tuple[float, list[int]]:
        self._history += tokens
        began = time.perf_counter()
        first, (said,) = self._generate([self._history], out, timed=True)
        self._history += said
        return first - began, said

    def decode(self, prompts: list[list[int]], out: int) -> int:
        return sum(map(len, self._generate(prompts, out, timed=False)[1]))

    @abstractmethod
    def _generate(self, rows: list[list[int]], out: int, *, timed: bool) -> tuple[float, list[list[int]]]:
        """Generate ``out`` tokens after each of ``rows``. Returns when the first token came, if ``timed``, and
        what was generated after each row."""


class Transformers(Resent):
    """transformers' ``generate``. ``keep``: one DynamicCache is kept for the conversation; false: every turn
    computes all of the history."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self._keep = keep
        self._cache: Any = None

    def load(self, folder: Path, dtype: str, threads: int) -> Json:
        """Load the model as transformers does, with its own attention over contiguous KV."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        torch.set_num_threads(threads)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        versions = {name: version(name) for name in ("torch", "transformers")}
        attention = self._model.config._attn_implementation
        return {"versions": versions, "precision": {"weights": dtype, "kv": dtype}, "attention": attention}

    def begin(self) -> None:
        from transformers import DynamicCache

        super().begin()
        self._cache = DynamicCache(config=self._model.config) if self._keep else None

    def _generate(self, rows: list[list[int]], out: int, *, timed: bool) -> tuple[float, list[list[int]]]:
        first, ids = FirstToken(skip=1), self._torch.tensor(rows)  # the prompt is put first
        fields = {"streamer": first, "past_key_values": self._cache} if timed else {}
        with self._torch.inference_mode():
            said = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=out,
                min_new_tokens=out,
                pad_token_id=0,
                **fields,
            )
        return first.at, [row[len(rows[0]) :] for row in said.tolist()]


OPENVINO_KINDS = {"float32": "f32", "bfloat16": "bf16"}
OPENVINO_CACHE_GB = 2


class OpenVINO(Resent):
    """openvino-genai with continuous batching and its prefix cache, on an F16 GGUF that is written beside the
    model."""

    def load(self, folder: Path, dtype: str, threads: int) -> Json:
        """Load the model. Weights are F16; computing and KV are in ``dtype`` (by its own default KV would be
        8-bit)."""
        import numpy
        import openvino
        import openvino_genai

        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = OPENVINO_CACHE_GB
        scheduler.enable_prefix_caching = True
        properties = {
            "INFERENCE_PRECISION_HINT": OPENVINO_KINDS[dtype],
            "KV_CACHE_PRECISION": OPENVINO_KINDS[dtype],
            "INFERENCE_NUM_THREADS": threads,
        }
        path = str(write_gguf(folder))
        self._pipe = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties=properties)
        return {
            "versions": {name: version(name) for name in ("openvino", "openvino-genai", "gguf")},
            "precision": {"weights": "float16", "computing": dtype, "kv": dtype},
            "step_tokens": scheduler.max_num_batched_tokens,
        }

    def _generate(self, rows: list[list[int]], out: int, *, timed: bool) -> tuple[float, list[list[int]]]:
        first, genai = FirstToken(skip=0), self._genai

        class Streamer(genai.StreamerBase):  # type: ignore[misc, name-defined]
            def write(self, token: Any) -> Any:
                first.put(token)
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                return

        config = genai.GenerationConfig(max_new_tokens=out, min_new_tokens=out, ignore_eos=True)
        ids = [self._openvino.Tensor(self._numpy.array([row], dtype=self._numpy.int64)) for row in rows]
        said = self._pipe.generate(ids, [config] * len(rows), *([Streamer()] if timed else ()))
        return first.at, [list(one.m_generation_ids[0]) for one in said]


VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, so that its steps are ours to time
    "VLLM_LOGGING_LEVEL": "ERROR",
}
VLLM_CONTEXT = 8192


class Vllm(Resent):
    """vLLM on the CPU: its engine core in this process, with its prefix cache."""

    def __init__(self) -> None:
        super().__init__()
        self._requests = 0

    def load(self, folder: Path, dtype: str, threads: int) -> Json:
        """Load the model for token ids without a tokenizer, with as many sequences at once as are asked for."""
        os.environ.update(VLLM_SETTINGS)
        from vllm import LLM, SamplingParams

        self._sampling = SamplingParams
        llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=VLLM_CONTEXT,
            enable_prefix_caching=True,
        )
        self._engine: Any = llm.llm_engine
        versions = {name: version(name) for name in ("vllm-cpu", "torch")}
        return {"versions": versions, "precision": {"weights": dtype, "kv": dtype}}

    def _generate(self, rows: list[list[int]], out: int, *, timed: bool) -> tuple[float, list[list[int]]]:
        asked = self._sampling(
            temperature=0, max_tokens=out, min_tokens=out, ignore_eos=True, detokenize=False
        )
        names = []
        for row in rows:
            self._requests += 1
            names.append(str(self._requests))
            self._engine.add_request(names[-1], {"prompt_token_ids": row}, asked)
        first, said = 0.0, {name: list[int]() for name in names}
        while self._engine.has_unfinished_requests():
            for one in self._engine.step():
                said[one.request_id] = list(one.outputs[0].token_ids)
                first = first or time.perf_counter()
        return first, [said[name] for name in names]


def write_gguf(folder: Path) -> Path:
    """Write the Qwen3 toy in ``folder`` as an F16 GGUF, with norms in F32 and a made-up vocabulary of one CJK
    character per id. Returns its path."""
    import gguf
    import numpy

    config = json.loads((folder / "config.json").read_text())
    path = folder / "model-f16.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    size = config["vocab_size"]
    characters = [chr(0x4E00 + number) for number in range(size)]
    characters[-2:] = characters[0] + characters[1], "<|end|>"  # readers want a merge and a special token
    writer.add_token_list(characters)
    writer.add_token_types([gguf.TokenType.NORMAL] * (size - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges([f"{characters[0]} {characters[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, array in read_safetensors(folder / "model.safetensors"):
        kind = numpy.float32 if "norm" in name else numpy.float16
        writer.add_tensor(_gguf_name(name), array.astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_safetensors(path: Path) -> list[tuple[str, Any]]:
    """The names and arrays of a safetensors file in BF16, F16 or F32, all converted to float32 (numpy alone has
    no BF16)."""
    import numpy

    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        data = raw[begin + first : begin + last]
        if entry["dtype"] == "BF16":
            array = (numpy.frombuffer(data, numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
        else:
            array = numpy.frombuffer(data, {"F16": numpy.float16, "F32": numpy.float32}[entry["dtype"]])
        found.append((name, array.astype(numpy.float32).reshape(entry["shape"])))
    return found


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{_GGUF_NAMES[stem]}.weight"
    number, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_GGUF_NAMES[part]}.weight"


ENGINES: dict[str, Callable[[], PeerEngine]] = {
    "transformers": lambda: Transformers(keep=False),
    "transformers-resend": lambda: Transformers(keep=False),
    "transformers-kept": lambda: Transformers(keep=True),
    "openvino-genai": OpenVINO,
    "vllm-cpu": Vllm,
}

if __name__ == "__main__":
    answer_all(ENGINES[sys.argv[1]]())
