"""Servers of SGLang: its own ``/generate``, with ``input_ids`` in and ``output_ids`` out."""

import base64
import json
import re
from collections.abc import Mapping
from functools import partial
from math import inf
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
    most_probable,
    positive,
    read_load,
    served_model,
)
from quire_router.engines.settings import KnownModel

_LOAD = {
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "usage",
}
_MAX_SEED = 2**31 - 1  # what all versions have room for
_BLOCK = 16
"""Tokens of the blocks in which its cache is remembered here. Its own tree of prefixes is exact to a page, mostly of
one token.
"""


class SglangServer(ServerKind):
    """A server of SGLang. Its load is known with ``--enable-metrics``; its sampler follows seeds with
    ``--enable-deterministic-inference`` only. Draws are keyed by seed and position then, as Quire's are.
    """

    name = "sglang"
    title = "SGLang"
    path = "/generate"
    unnamed_status = 400  # what it finds wrong with a request it says in the stream, and names no code

    def __init__(self) -> None:
        self._blocks = 0
        self._has_metrics = True

    def unsupported(self, params: SamplingParams, *, resumed: bool) -> QuireError | None:
        """SGLang reads grammars in a notation of its own."""
        if params.structured is not None and params.structured.kind is StructuredKind.GRAMMAR:
            return self._cannot(params.structured.param, "grammars in Lark's notation")
        return super().unsupported(params, resumed=resumed)

    def body(self, choice: ChoiceRequest) -> dict[str, Any]:
        """The request in SGLang's words; the server has one model."""
        params = choice.params
        sampling: dict[str, Any] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "sampling_seed": params.seed & _MAX_SEED,
            "max_new_tokens": params.max_tokens,
            "min_new_tokens": params.min_tokens,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
        }
        if params.logit_bias:
            sampling["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
        if params.structured is not None:
            sampling |= _structured(params.structured)
        body: dict[str, Any] = {
            "rid": choice.request_id,
            "input_ids": choice.token_ids,
            "sampling_params": sampling,
            "stream": True,
        }
        if params.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": params.logprobs}
        if choice.salt:
            body["extra_key"] = base64.b64encode(choice.salt).decode()
        return body

    def reader(self, choice: ChoiceRequest) -> ChoiceReader:
        """Reads the answer to ``body``."""
        return _SglangReader(choice)

    async def describe(self, http: HttpClient, models: Mapping[str, KnownModel]) -> engine_pb2.DescribeResponse:
        """From ``/v1/models`` and ``/get_server_info``."""
        entry, names = served_model(await http.get_json("/v1/models"), models)
        info = await _server_info(http)
        self._has_metrics = bool(info.get("enable_metrics", True))
        states = info.get("internal_states")
        state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
        self._blocks = positive(info.get("max_total_num_tokens")) // _BLOCK
        return engine_pb2.DescribeResponse(
            served_model_names=names,
            model_revision=f"{self.name}:{info.get('model_path') or names[0]}",
            max_model_len=positive(entry.get("max_model_len")) or positive(info.get("context_length")),
            block_size=_BLOCK,
            blocks_total=self._blocks,
            max_num_seqs=positive(state.get("effective_max_running_requests_per_dp"))
            or positive(info.get("max_running_requests")),
            version=str(info.get("version", "")),
            prefix_caching=not info.get("disable_radix_cache", False),
        )

    async def tokenize(self, http: HttpClient, model: str, text: str) -> list[int] | None:
        """From ``/tokenize``."""
        return await ask_tokenize(http, model, text)

    async def load(self, http: HttpClient) -> engine_pb2.Load:
        """From ``/health``, and ``/metrics`` where it has them."""
        await http.get("/health")
        if not self._has_metrics:
            return engine_pb2.Load()
        return await http.parse(await http.get("/metrics"), partial(read_load, names=_LOAD, blocks=self._blocks))


class _SglangReader(ChoiceReader):
    """Events have all tokens so far, or with ``--incremental-streaming-output`` the new ones. Their number so far is in
    both, so the last ones of each list are what is new.
    """

    def __init__(self, choice: ChoiceRequest) -> None:
        super().__init__(choice)
        self._seen = 0

    def _read(self, event: Json) -> Output | None:
        info = event["meta_info"]
        new = info["completion_tokens"] - self._seen
        reason = _reason(info["finish_reason"])
        if new < 0 or (new == 0 and reason is None):
            return None
        token_ids = list(event["output_ids"][-new:]) if new else []
        if len(token_ids) != new:
            raise BadAnswer("an event lacks token ids")
        self._seen += new
        output = Output(token_ids, self.position, reason, index=self.index)
        output.cached_tokens = positive(info.get("cached_tokens"))
        if self.wants_logprobs and new:
            output.logprobs = self._logprobs(info, new)
        stopped_by = (info["finish_reason"] or {}).get("matched")
        if reason is FinishReason.STOP and token_ids and token_ids[-1] == stopped_by:
            return drop_stop_token(output, self.stop_token_ids)
        return output

    def _logprobs(self, info: Json, new: int) -> list[TokenLogprobs]:
        chosen = info["output_token_logprobs"][-new:]
        top = info["output_top_logprobs"][-new:] if self.num_top else [[]] * new
        if len(chosen) != new or len(top) != new:
            raise BadAnswer("tokens lack their log-probabilities")
        return [
            TokenLogprobs(
                float(logprob),
                most_probable([(token_id, _logprob(value)) for value, token_id, *_ in others or ()], self.num_top),
            )
            for (logprob, *_), others in zip(chosen, top, strict=True)
        ]


def _logprob(value: float | None) -> float:
    """SGLang writes minus infinity as null."""
    return -inf if value is None else float(value)


async def _server_info(http: HttpClient) -> Json:
    """Under its name in most versions, or the one to come."""
    try:
        return await http.get_json("/get_server_info")
    except ServerError as error:
        if error.status != 404:
            raise
        return await http.get_json("/server_info")


def _reason(finish: Json | None) -> FinishReason | None:
    if finish is None:
        return None
    if finish["type"] == "length":
        return FinishReason.LENGTH
    if finish["type"] == "stop":
        return FinishReason.STOP
    status = finish.get("status_code")
    if type(status) is int and 400 <= status < 600:
        raise ServerError(status, str(finish.get("message", ""))[:300])
    raise EngineLost(f"the engine gave the request back ({finish['type']})")


def _structured(structured: Structured) -> dict[str, str]:
    if structured.kind is StructuredKind.JSON_OBJECT:
        return {"json_schema": json.dumps({"type": "object"})}
    if structured.kind is StructuredKind.JSON_SCHEMA:
        return {"json_schema": structured.text}
    if structured.kind is StructuredKind.CHOICE:
        return {"regex": "|".join(f"({re.escape(option)})" for option in structured.options)}
    return {"regex": structured.text}
