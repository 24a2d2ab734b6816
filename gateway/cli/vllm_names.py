"""Options of ``vllm serve`` that have no meaning here, each with what to do instead.

Those that mean the same are further names of our own options: `also` in an `Option`.
"""

from __future__ import annotations

_TOOLS = "tools need no switch: a request that gives tools can call them"
_ONE_DEVICE = "a server computes on one device, which --device names"
_AS_STORED = "the model's files say it"
_PREFIX_CACHE = "the prefix cache is always on"
_CHUNKS = "prefill is always in chunks: --max-step-tokens bounds one"
_LOGS = "no line of the log has text of prompts or replies; --log-level warning leaves out single requests"
_ADAPTERS = "adapters are not served"
_CACHE = "$HOLDFAST_CACHE names the folder of fetched models"
_BY_REQUEST = "a request says it"

HINTS = {
    "--model": "the model is an argument: holdfast serve MODEL",
    "--num-gpu-blocks-override": "--kv-bytes sizes the KV",
    "--swap-space": "--host-bytes sizes the KV below the device",
    "--kv-offloading-size": "--host-bytes sizes the KV below the device",
    "--kv-offloading-backend": "--host-bytes sizes the KV below the device",
    "--cpu-offload-gb": "weights stay on the device",
    "--enable-prefix-caching": _PREFIX_CACHE,
    "--no-enable-prefix-caching": _PREFIX_CACHE,
    "--prefix-caching-hash-algo": _PREFIX_CACHE,
    "--enable-chunked-prefill": _CHUNKS,
    "--no-enable-chunked-prefill": _CHUNKS,
    "--tensor-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--data-parallel-size": _ONE_DEVICE,
    "-dp": _ONE_DEVICE,
    "--enable-expert-parallel": _ONE_DEVICE,
    "--distributed-executor-backend": _ONE_DEVICE,
    "--enable-auto-tool-choice": _TOOLS,
    "--tool-parser-plugin": "--tool-call-parser names a form",
    "--enable-reasoning": "--reasoning-parser says how the model writes it",
    "--chat-template": "the model's own template is used",
    "--tokenizer": "the tokenizer comes with the model",
    "--tokenizer-mode": "the tokenizer comes with the model",
    "--trust-remote-code": "no code of a model's folder is run",
    "--quantization": _AS_STORED,
    "-q": _AS_STORED,
    "--load-format": _AS_STORED,
    "--hf-overrides": _AS_STORED,
    "--rope-scaling": _AS_STORED,
    "--config-format": _AS_STORED,
    "--download-dir": _CACHE,
    "--scheduling-policy": "--policy names the order of turns",
    "--seed": _BY_REQUEST,
    "--max-logprobs": _BY_REQUEST,
    "--generation-config": "the model's own defaults are taken",
    "--override-generation-config": _BY_REQUEST,
    "--default-chat-template-kwargs": _BY_REQUEST,
    "--speculative-config": "no draft model is served",
    "--enable-lora": _ADAPTERS,
    "--lora-modules": _ADAPTERS,
    "--allowed-origins": "--allow-origin ORIGIN, once for each",
    "--allowed-methods": "--allow-origin admits web pages",
    "--allowed-headers": "--allow-origin admits web pages",
    "--allow-credentials": "--allow-origin admits web pages",
    "--ssl-ca-certs": "clients are known by their keys",
    "--ssl-cert-reqs": "clients are known by their keys",
    "--uvicorn-log-level": "--log-level",
    "--disable-uvicorn-access-log": _LOGS,
    "--enable-log-requests": _LOGS,
    "--disable-log-requests": _LOGS,
    "--disable-log-stats": "GET /metrics costs nothing where nothing asks for it",
    "--response-role": "replies are the assistant's",
    "--api-server-count": "one gateway process serves all sessions",
    "--headless": "the server always listens",
    "--middleware": "a proxy in front of the server can do it",
}
"""What to do instead, as text, by the name of vLLM's option."""
