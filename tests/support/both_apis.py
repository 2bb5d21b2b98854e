"""The same request for both APIs: fields of a REST body, as a message."""

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2

SCALARS = {
    "temperature", "top_p", "top_k", "seed", "max_tokens", "ignore_eos", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "n", "best_of", "beam_width", "length_penalty",
    "prompt_logprobs",
}  # fmt: skip
EARLY = {False: 0, True: types_pb2.EARLY_STOPPING_FIRST, "never": types_pb2.EARLY_STOPPING_NEVER}
BESIDE = ("stop", "include_stop_str_in_output", "skip_special_tokens", "priority", "echo", "background")


def as_proto(fields: dict[str, object]) -> pb.GenerateRequest | pb.ChatRequest:
    """What a client of the other API sends for the same."""
    words = fields.get("bad_words", [])
    beside = {name: fields[name] for name in BESIDE if name in fields}
    beside["bad_words"] = [word for word in words if isinstance(word, str)]
    common = {"model": fields["model"], "sampling": sampling_of(fields), **beside}
    if "messages" in fields:
        return pb.ChatRequest(messages=[pb.ChatMessage(**each) for each in fields["messages"]], **common)
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        return pb.GenerateRequest(token_ids=types_pb2.TokenIds(ids=prompt), **common)
    return pb.GenerateRequest(**({} if prompt is None else {"text": prompt}), **common)


def sampling_of(fields: dict[str, object]) -> types_pb2.SamplingParams:
    """The fields that say how tokens are drawn."""
    sampling = types_pb2.SamplingParams(
        stop_token_ids=fields.get("stop_token_ids", []),
        logit_bias={int(token_id): bias for token_id, bias in fields.get("logit_bias", {}).items()},
        bad_words=[types_pb2.TokenIds(ids=word) for word in fields.get("bad_words", []) if not isinstance(word, str)],
        early_stopping=EARLY[fields.get("early_stopping", False)],
        **{name: value for name, value in fields.items() if name in SCALARS},
    )
    logprobs = fields.get("top_logprobs", 0) if fields.get("logprobs") is True else fields.get("logprobs")
    if logprobs is not None:
        sampling.logprobs = logprobs
    if "structured_outputs" in fields:
        sampling.structured.CopyFrom(structured_of(fields["structured_outputs"]))
    return sampling


def structured_of(fields: dict[str, object]) -> types_pb2.Structured:
    """At most one of the kinds, as a message can only have."""
    if "choice" in fields:
        return types_pb2.Structured(choice=types_pb2.Choice(options=fields["choice"]))
    names = {"json": "json_schema"}
    return types_pb2.Structured(**{names.get(name, name): value for name, value in fields.items()})
