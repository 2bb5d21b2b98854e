"""Flags of vLLM, SGLang and the OpenAI server that ``quire-engine`` does not have, and what to do instead of each."""

from collections.abc import Mapping

_SEEN = "tool calls and thoughts are read as the model's chat template writes them"
_AN_ENGINE_EACH = "each engine of a group is a command of its own, with its --data-parallel-rank, behind a router"
_WITHOUT_RAY = "engines of a group meet without Ray"
_SHARED_EXPERTS = "--tensor-parallel-size and --data-parallel-size share experts among ranks"
_SPECULATION = "--speculative-method and --num-speculative-tokens set it; there are no draft models"
# vLLM's short flags for what is a flag here.
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-q": "--quantization",
    "-n": "--nnodes",
    "-r": "--node-rank",
}
_OF_A_REQUEST = "each request says that for itself, as a parameter"
FOREIGN_FLAGS: Mapping[str, str] = {
    **{short: f"use {flag}" for short, flag in _SHORT.items()},
    **dict.fromkeys(("-dpl", "-dpr", "-dpe", "-dph"), _AN_ENGINE_EACH),
    "-dpb": _WITHOUT_RAY,
    "-ep": _SHARED_EXPERTS,
    "-sc": _SPECULATION,
    "--api-key": "keys are the router's, which has this flag",
    "--chat-template": "a template is part of the model's folder, as chat_template.jinja",
    "--tokenizer": "the tokenizer is part of the model's folder",
    "--trust-remote-code": "no code of a model's folder is run",
    "--enable-auto-tool-choice": _SEEN,
    "--tool-call-parser": _SEEN,
    "--reasoning-parser": _SEEN,
    "--enable-chunked-prefill": "prompts are always computed in chunks, of --max-num-batched-tokens",
    **dict.fromkeys(("--data-parallel-size-local", "--data-parallel-start-rank"), _AN_ENGINE_EACH),
    **dict.fromkeys(("--data-parallel-external-lb", "--data-parallel-hybrid-lb"), _AN_ENGINE_EACH),
    "--data-parallel-backend": _WITHOUT_RAY,
    "--dp-size": "use --data-parallel-size",
    "--enable-dp-attention": "--data-parallel-size does it",
    "--dist-init-addr": "--master-addr and --master-port are the two parts of it",
    "--tp-size": "use --tensor-parallel-size",
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--context-length": "use --max-model-len",
    "--kv-cache-memory-bytes": "use --kv-cache-memory",
    "--num-gpu-blocks-override": "--kv-cache-memory sets the memory of KV blocks",
    "--task": "--runner and --convert say it",
    "--pooler-config": "--pooling-type sets it; requests choose use_activation and dimensions",
    "--override-pooler-config": "--pooling-type sets it; requests choose use_activation and dimensions",
    "--is-embedding": "use --convert embed",
    "--speculative-config": _SPECULATION,
    "--dbo-decode-token-threshold": "--dbo-prefill-token-threshold is for all steps",
    "--enable-two-batch-overlap": "use --enable-dbo",
    "--enable-expert-parallel": _SHARED_EXPERTS,
    "--limit-mm-per-prompt": "models are served for text only",
    "--kv-transfer-config": "prefill and decode are not separated",
    "--batching": "engines batch continuously; static and phased batching are in quire-engine simulate, to compare "
    "with",
    "--guided-decoding-backend": "there is one way to structured output, which needs no choice",
    "--structured-outputs-config": "there is one way to structured output, which needs no choice",
    "--load-format": "the files of the model say what they are",
    "--revision": "quire serve MODEL@REVISION names it",
    "--download-dir": "the variable HF_HOME names the folder of downloads",
    "--disable-log-requests": "requests are not logged",
    "--enable-log-requests": "requests are not logged; their traces go to OTEL_EXPORTER_OTLP_ENDPOINT",
    **dict.fromkeys(("--max-tokens", "--temperature", "--top-p", "--top-k"), _OF_A_REQUEST),
}
