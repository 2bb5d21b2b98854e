"""Servers of the OpenAI API of which nothing else is known: ``/v1/completions`` with text in and out."""

from collections.abc import Mapping
from typing import Any

from quire.v1 import engine_pb2
from quire_proto.errors import QuireError
from quire_proto.sampling import FinishReason, SamplingParams
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.engines.attempt import EngineLost, Output
from quire_router.engines.external.http_client import BadAnswer, HttpClient, Json
from quire_router.engines.external.server_kind import (
    ChoiceReader,
    ChoiceRequest,
    ServerKind,
    positive,
    served_model,
)
from quire_router.engines.settings import KnownModel

_BLOCK = 16
_PIECES = ("Hello, wor", "ld!", " É 中文", "\n  x = 1", "  ", "9")
"""Texts as a server may cut an answer."""


class OpenAIServer(ServerKind):
    """A server of the OpenAI API. The prompt is sent as text, which the server tokenises again; what it answers is text
    again, and the tokens that the router counts and writes down are its own tokenizer's of each piece. So neither need
    be the model's.
    """

    name = "openai"
    title = "a server of the OpenAI API"
    path = "/v1/completions"

    def __init__(self) -> None:
        self._tokenizer: ModelTokenizer | None = None

    def unsupported(self, params: SamplingParams, *, resumed: bool) -> QuireError | None:
        """Whatever the OpenAI API has no field for, and what is said in tokens."""
        wanted = {
            "top_k": params.top_k > 0,
            "min_p": params.min_p > 0,
            "repetition_penalty": params.repetition_penalty != 1,
            "stop_token_ids": bool(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "min_tokens": params.min_tokens > 0,
            "logprobs": params.logprobs is not None,
            "best_of": params.wants_logprobs,
        }
        for param, is_wanted in wanted.items():
            if is_wanted:
                return self._cannot(param, param)
        if params.structured is not None:
            return self._cannot(params.structured.param, "structured outputs")
        return super().unsupported(params, resumed=resumed)

    def body(self, choice: ChoiceRequest) -> dict[str, Any]:
        """The request in the API's words. What the server's tokenizer puts before every text is left out."""
        params, tokenizer = choice.params, self._known_tokenizer()
        token_ids, start = list(choice.token_ids), tokenizer.encode_text("")
        text = tokenizer.decode(token_ids[len(start) :] if start and token_ids[: len(start)] == start else token_ids)
        body: dict[str, Any] = {
            "model": choice.model,
            "prompt": text,
            "stream": True,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": choice.fresh_seed,
            "max_tokens": params.max_tokens,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
        }
        if params.logit_bias:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
        return body

    def reader(self, choice: ChoiceRequest) -> ChoiceReader:
        """Reads the answer to ``body``."""
        return _TextReader(choice, self._known_tokenizer())

    async def describe(self, http: HttpClient, models: Mapping[str, KnownModel]) -> engine_pb2.DescribeResponse:
        """From ``/v1/models``; some servers say there how long a prompt can be, as vLLM does."""
        entry, names = served_model(await http.get_json("/v1/models"), models)
        self._tokenizer = models[names[0]].tokenizer if names[0] in models else None
        if self._tokenizer is not None and not _joins(self._tokenizer):
            raise BadAnswer("it answers in text, and this model's tokenizer cannot encode a text piece by piece")
        return engine_pb2.DescribeResponse(
            served_model_names=names,
            model_revision=f"{self.name}:{names[0]}",
            max_model_len=positive(entry.get("max_model_len")),
            block_size=_BLOCK,
            prefix_caching=True,
        )

    async def tokenize(self, http: HttpClient, model: str, text: str) -> list[int] | None:  # noqa: ARG002 - of the kind
        """None: the API has nothing that says it."""
        return None

    async def load(self, http: HttpClient) -> engine_pb2.Load:
        """The API has nothing that says how busy a server is: that it lists its models is all that is asked."""
        await http.get_json("/v1/models")
        return engine_pb2.Load()

    def _known_tokenizer(self) -> ModelTokenizer:
        assert self._tokenizer is not None, "a server that serves none of the router's models gets no requests"
        return self._tokenizer


class _TextReader(ChoiceReader):
    """The server may count other tokens than the router's: an answer ends at the router's ``max_tokens`` at the
    latest.
    """

    def __init__(self, choice: ChoiceRequest, tokenizer: ModelTokenizer) -> None:
        super().__init__(choice)
        self._tokenizer = tokenizer

    def _read(self, event: Json) -> Output | None:
        if not event["choices"]:
            return None
        choice = event["choices"][0]
        text, reason = choice.get("text") or "", _reason(choice.get("finish_reason"))
        try:
            token_ids = self._tokenizer.encode_text(text, add_special_tokens=False) if text else []
        except QuireError as error:
            raise BadAnswer(f"its answer is not text: {error.message}") from None
        if len(token_ids) > self.left:
            token_ids, reason = token_ids[: self.left], FinishReason.LENGTH
        if not token_ids and reason is None:
            return None
        return Output(token_ids, self.position, reason, index=self.index)


def _reason(text: str | None) -> FinishReason | None:
    if not text:
        return None
    if text in ("stop", "length"):
        return FinishReason(text)
    raise EngineLost(f"the engine gave the request back ({text})")


def _joins(tokenizer: ModelTokenizer) -> bool:
    """Whether the tokens of pieces, one behind the other, are tokens of the whole text. Those of tokenizers that put a
    space before each text, as SentencePiece's do, are not.
    """
    encoded = [tokenizer.encode_text(piece, add_special_tokens=False) for piece in _PIECES]
    return tokenizer.decode([token_id for piece in encoded for token_id in piece]) == "".join(_PIECES)
