"""Options of ``vllm serve`` that have no meaning here, each with what to do instead.

Those that mean the same are further names of our own options: `also` in an `Option`.
"""

from __future__ import annotations

_INSTEAD = {
    "the model is an argument: holdfast serve MODEL": "--model",
    "--kv-bytes sizes the KV": "--num-gpu-blocks-override",
    "--host-bytes sizes the KV below the device": "--swap-space --kv-offloading-size --kv-offloading-backend",
    "weights stay on the device": "--cpu-offload-gb",
    "the prefix cache is always on": (
        "--enable-prefix-caching --no-enable-prefix-caching --prefix-caching-hash-algo"
    ),
    "prefill is always in chunks: --max-step-tokens bounds one": (
        "--enable-chunked-prefill --no-enable-chunked-prefill"
    ),
    "a server computes on one device, which --device names": (
        "--tensor-parallel-size -tp --pipeline-parallel-size -pp --data-parallel-size -dp"
        " --enable-expert-parallel --distributed-executor-backend"
    ),
    "tools need no switch: a request that gives tools can call them": "--enable-auto-tool-choice",
    "--tool-call-parser names a form": "--tool-parser-plugin",
    "--reasoning-parser says how the model writes it": "--enable-reasoning",
    "the model's own template is used": "--chat-template",
    "the tokenizer comes with the model": "--tokenizer --tokenizer-mode",
    "no code of a model's folder is run": "--trust-remote-code",
    "--quantization KIND quantises a model as it is loaded; of a quantised one its files say it": "-q",
    "the model's files say it": "--load-format --hf-overrides --rope-scaling --config-format",
    "$HOLDFAST_CACHE names the folder of fetched models": "--download-dir",
    "--policy names the order of turns": "--scheduling-policy",
    "a request says it": "--seed --max-logprobs --override-generation-config --default-chat-template-kwargs",
    "the model's own defaults are taken": "--generation-config",
    "no draft model is served": "--speculative-config",
    "adapters of embeddings are not served": "--enable-lora-bias --lora-extra-vocab-size --fully-sharded-loras",
    "an adapter has the type of the model": "--lora-dtype",
    "a prompt is for the adapter that a request names": "--default-mm-loras",
    "--allow-origin ORIGIN, once for each": "--allowed-origins",
    "--allow-origin admits web pages": "--allowed-methods --allowed-headers --allow-credentials",
    "clients are known by their keys": "--ssl-ca-certs --ssl-cert-reqs",
    "--log-level": "--uvicorn-log-level",
    "no line of the log has text of prompts or replies; --log-level warning leaves out single requests": (
        "--disable-uvicorn-access-log --enable-log-requests --disable-log-requests"
    ),
    "GET /metrics costs nothing where nothing asks for it": "--disable-log-stats",
    "replies are the assistant's": "--response-role",
    "one gateway process serves all sessions": "--api-server-count",
    "the server always listens": "--headless",
    "a proxy in front of the server can do it": "--middleware",
}
HINTS = {name: instead for instead, names in _INSTEAD.items() for name in names.split()}
"""What to do instead, as text, by the name of vLLM's option."""
