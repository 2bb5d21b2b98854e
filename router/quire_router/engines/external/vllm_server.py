"""Servers of vLLM: ``/v1/completions`` with token ids in and out (``return_token_ids``, since 0.10.2)."""

import base64
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from quire.v1 import engine_pb2
from quire_proto.errors import QuireError
from quire_proto.sampling import FinishReason, SamplingParams, TokenLogprobs
from quire_proto.structured_output import Structured, StructuredKind

from quire_router.engines.attempt import EngineLost, Output
from quire_router.engines.external.http_client import BadAnswer, HttpClient, Json, ServerError
from quire_router.engines.external.server_kind import (
    ChoiceReader,
    ChoiceRequest,
    ServerKind,
    ask_tokenize,
    drop_stop_token,
    iter_samples,
    most_probable,
    positive,
    read_load,
    served_model,
)
from quire_router.engines.settings import KnownModel

OLDEST = (0, 10, 2)
_STRUCTURED_SINCE = (0, 11)
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_CACHE_INFO = "vllm:cache_config_info"
_LOAD = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "usage",
    "vllm:gpu_cache_usage_perc": "usage",  # before 0.11; not of both names at once
}
_STRUCTURED_KEYS = {
    StructuredKind.JSON_SCHEMA: "json",
    StructuredKind.REGEX: "regex",
    StructuredKind.GRAMMAR: "grammar",
}


class VllmServer(ServerKind):
    """A server of vLLM. Its prefix cache is salted as Quire's is, and its sampler seeded, but from the start of each
    request on: see docs/other-engines.md for what that means after a failover.
    """

    name = "vllm"
    title = "vLLM"
    path = "/v1/completions"

    def __init__(self) -> None:
        self._version: tuple[int, ...] = ()
        self._blocks = 0

    def unsupported(self, params: SamplingParams, *, resumed: bool) -> QuireError | None:
        """Older versions ignore ``structured_outputs``."""
        if params.structured is not None and self._version and self._version < _STRUCTURED_SINCE:
            return self._cannot(params.structured.param, "structured outputs")
        return super().unsupported(params, resumed=resumed)

    def body(self, choice: ChoiceRequest) -> dict[str, Any]:
        """The request in vLLM's words. Stop strings are not among them: the router looks for them."""
        params = choice.params
        body: dict[str, Any] = {
            "model": choice.model,
            "prompt": choice.token_ids,
            "stream": True,
            "return_token_ids": True,
            "add_special_tokens": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "seed": choice.fresh_seed,
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "priority": choice.priority,
        }
        if params.logit_bias:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
        if params.logprobs is not None:
            body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
        if params.structured is not None:
            body["structured_outputs"] = _structured(params.structured)
        if choice.salt:
            body["cache_salt"] = base64.b64encode(choice.salt).decode()
        return body

    def reader(self, choice: ChoiceRequest) -> ChoiceReader:
        """Reads the answer to ``body``."""
        return _VllmReader(choice)

    async def describe(self, http: HttpClient, models: Mapping[str, KnownModel]) -> engine_pb2.DescribeResponse:
        """From ``/version``, ``/v1/models`` and the cache's configuration among the metrics."""
        version = str((await http.get_json("/version")).get("version", ""))
        found = _VERSION.match(version)
        self._version = tuple(int(part or 0) for part in found.groups()) if found else ()
        if self._version and self._version < OLDEST:
            raise BadAnswer(f"it is vLLM {version}, which cannot answer with token ids: 0.10.2 or newer is needed")
        entry, names = served_model(await http.get_json("/v1/models"), models)
        caches = await http.parse(await http.get("/metrics"), _caches)
        cache = caches[0] if caches else {}
        self._blocks = sum(positive(each.get("num_gpu_blocks")) for each in caches)
        prefix_caching = cache.get("enable_prefix_caching") == "True"
        self.publishes_kv_events = prefix_caching and len(caches) == 1  # of several caches it chooses one itself
        return engine_pb2.DescribeResponse(
            served_model_names=names,
            model_revision=f"{self.name}:{entry.get('root') or names[0]}",
            max_model_len=positive(entry.get("max_model_len")),
            block_size=positive(cache.get("block_size")),
            blocks_total=self._blocks,
            version=version,
            prefix_caching=prefix_caching,
        )

    async def tokenize(self, http: HttpClient, model: str, text: str) -> list[int] | None:
        """From ``/tokenize``."""
        return await ask_tokenize(http, model, text)

    async def load(self, http: HttpClient) -> engine_pb2.Load:
        """From ``/health`` and ``/metrics``."""
        await http.get("/health")
        return await http.parse(await http.get("/metrics"), partial(read_load, names=_LOAD, blocks=self._blocks))


def _caches(metrics: bytes) -> list[Mapping[str, str]]:
    return [labels for _, labels, _ in iter_samples(metrics, {_CACHE_INFO: ""})]


class _VllmReader(ChoiceReader):
    def _read(self, event: Json) -> Output | None:
        if not event["choices"]:
            return None  # the usage
        choice = event["choices"][0]
        token_ids, reason = choice["token_ids"], _reason(choice["finish_reason"])
        if token_ids is None:
            raise BadAnswer("it does not answer with token ids")
        logprobs = _logprobs(choice["logprobs"], len(token_ids), self.num_top) if self.wants_logprobs else []
        output = Output(list(token_ids), self.position, reason, index=self.index, logprobs=logprobs)
        return drop_stop_token(output, self.stop_token_ids) if reason is FinishReason.STOP else output


def _reason(text: str | None) -> FinishReason | None:
    if text is None:
        return None
    if text == "length":
        return FinishReason.LENGTH
    if text == "stop":
        return FinishReason.STOP
    if text == "error":
        raise ServerError(500, "the engine ended the request with an error")
    raise EngineLost(f"the engine gave the request back ({text})")


def _logprobs(found: Mapping[str, Any], expected: int, num_top: int) -> list[TokenLogprobs]:
    """Each ``top_logprobs`` has the token that was drawn, and the most probable ones, of which it may be one."""
    chosen, top = found["token_logprobs"], found["top_logprobs"]
    if len(chosen) != expected:
        raise BadAnswer("tokens lack their log-probabilities")
    return [_one(logprob, others, num_top) for logprob, others in zip(chosen, top, strict=True)]


def _one(logprob: float, others: Mapping[str, float], num_top: int) -> TokenLogprobs:
    pairs = [(int(name.removeprefix("token_id:")), float(value)) for name, value in others.items()]
    return TokenLogprobs(float(logprob), most_probable(pairs, num_top))


def _structured(structured: Structured) -> dict[str, Any]:
    if structured.kind is StructuredKind.JSON_OBJECT:
        return {"json_object": True}
    if structured.kind is StructuredKind.CHOICE:
        return {"choice": structured.options}
    return {_STRUCTURED_KEYS[structured.kind]: structured.text}
