"""Steps and their outputs as plain values, for a file or a message: JSON types, plus bytes and arrays of numbers, which
each reader and writer encodes in its own way.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from quire_proto.errors import ErrorCode, QuireError
from quire_proto.pooling import PoolingParams, Task
from quire_proto.sampling import SamplingParams, TokenLogprobs

from quire_engine.core.block_pool import BlockCopies, BlockCopy, PoolCopies
from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import (
    BeamCandidates,
    Grammar,
    ModelOutput,
    NewRequest,
    SampleRequest,
    SchedulerOutput,
    StepTimings,
)

T = TypeVar("T")

_COLUMNS = {"sequence_ids": "q", "rows": "i", "starts": "i", "lengths": "i", "num_draws": "i"}
_OTHER_ARRAYS = {"new_tokens": "i", "freed_rows": "i", "awaiting": "i"}
_NUMBERS = ("num_preempted", "max_seconds", "has_fragments")
_STATE_COPIES = ("blocks_to_swap_out", "blocks_to_copy", "blocks_to_swap_in")
_COPIES = (*_STATE_COPIES, "blocks_to_swap_ahead")


def step_to_plain(output: SchedulerOutput) -> dict[str, Any]:
    """Returns the step as JSON types and arrays, without empty fields. Leaves out transfers to and from the disk. Of a
    grammar it keeps only whether there is one.
    """
    plain: dict[str, Any] = {name: getattr(output, name) for name in (*_COLUMNS, *_OTHER_ARRAYS, *_NUMBERS)}
    plain["new"] = [_new_to_plain(new) for new in output.new]
    plain["new_blocks"] = output.new_blocks if any(output.new_blocks) else ()
    plain["drafts"] = list(output.drafts.items())
    plain["copies"] = _copies_to_plain(output.copies, _COPIES)
    if output.copies.states is not None:
        plain["state_copies"] = _copies_to_plain(output.copies.states, _STATE_COPIES)
    kept = {name: value for name, value in plain.items() if value}
    return {"step": output.step, "groups": len(output.new_blocks), **kept}


def step_from_plain(plain: Mapping[str, Any], grammar: Grammar | None = None) -> SchedulerOutput:
    """The inverse of ``step_to_plain``; uses ``grammar`` for each grammar that the step had. Raises ``LookupError``,
    ``TypeError``, ``ValueError``, ``OverflowError``, ``AttributeError`` or ``QuireError`` if ``plain`` is not a valid
    step.
    """
    arrays: dict[str, Any] = {
        name: _array(code, plain.get(name, ())) for name, code in (_COLUMNS | _OTHER_ARRAYS).items()
    }
    if len({len(arrays[name]) for name in _COLUMNS}) > 1:
        raise ValueError("the columns of a step differ in length")
    copies = BlockCopies()
    _copies_from_plain(plain.get("copies", {}), copies, _COPIES)
    if "state_copies" in plain:
        copies.states = PoolCopies()
        _copies_from_plain(plain["state_copies"], copies.states, _STATE_COPIES)
    new_blocks = plain.get("new_blocks") or [() for _ in range(plain["groups"])]
    return SchedulerOutput(
        plain["step"],
        copies,
        [_new_from_plain(new, grammar) for new in plain.get("new", ())],
        new_blocks=tuple(_array("i", changes) for changes in new_blocks),
        drafts={number: tuple(token_ids) for number, token_ids in plain.get("drafts", ())},
        num_preempted=plain.get("num_preempted", 0),
        max_seconds=plain.get("max_seconds", 0.0),
        has_fragments=plain.get("has_fragments", False),
        **arrays,
    )


def output_to_plain(output: ModelOutput) -> dict[str, Any]:
    """Returns the output of a step as JSON types, bytes and an array."""
    return {
        "token_ids": array("i", output.token_ids),
        "logprobs": {number: _logprobs_to_plain(each) for number, each in output.logprobs.items()},
        "candidates": {number: (each.token_ids, each.logprobs) for number, each in output.candidates.items()},
        "pooled": output.pooled,
        "draw_errors": {number: error_to_plain(error) for number, error in output.draw_errors.items()},
        "prompt_logprobs": {
            number: list(map(_logprobs_to_plain, each)) for number, each in output.prompt_logprobs.items()
        },
        "errors": {number: error_to_plain(error) for number, error in output.errors.items()},
        "timings": asdict(output.timings),
    }


def output_from_plain(plain: Mapping[str, Any]) -> ModelOutput:
    """The inverse of ``output_to_plain``. Raises like ``step_from_plain``."""

    def by_number(name: str, convert: Callable[[Any], T]) -> dict[int, T]:
        return {int(number): convert(value) for number, value in plain[name].items()}

    return ModelOutput(
        plain["token_ids"].tolist(),
        by_number("logprobs", _logprobs_from_plain),
        by_number("candidates", lambda each: BeamCandidates(*each)),
        by_number("pooled", bytes),
        by_number("draw_errors", error_from_plain),
        by_number("prompt_logprobs", lambda each: list(map(_logprobs_from_plain, each))),
        by_number("errors", error_from_plain),
        StepTimings(**plain["timings"]),
    )


def error_to_plain(error: QuireError) -> list[Any]:
    """Returns the fields of one request's error."""
    return [error.code, error.message, error.param, error.retry_after, error.reason]


def error_from_plain(fields: Sequence[Any]) -> QuireError:
    """The inverse of ``error_to_plain``. Raises like ``step_from_plain``."""
    code, message, param, retry_after, reason = fields
    return QuireError(ErrorCode(code), message, param=param, retry_after=retry_after, reason=reason)


def _copies_to_plain(copies: PoolCopies, names: Sequence[str]) -> dict[str, Any]:
    lists = {name: getattr(copies, name) for name in names}
    return {name: [(each.source, each.target) for each in some] for name, some in lists.items() if some}


def _copies_from_plain(plain: Mapping[str, Any], copies: PoolCopies, names: Sequence[str]) -> None:
    for name in names:
        getattr(copies, name).extend(BlockCopy(*pair) for pair in plain.get(name, ()))


def _logprobs_to_plain(logprobs: TokenLogprobs) -> list[Any]:
    return [logprobs.logprob, logprobs.top]


def _logprobs_from_plain(fields: Sequence[Any]) -> TokenLogprobs:
    logprob, top = fields
    return TokenLogprobs(logprob, tuple((token_id, value) for token_id, value in top))


def lora_to_plain(lora: LoRARequest) -> list[Any]:
    """Returns the fields of an adapter."""
    return [lora.lora_name, lora.lora_int_id, str(lora.lora_path), lora.digest.hex()]


def lora_from_plain(fields: Sequence[Any]) -> LoRARequest:
    """The inverse of ``lora_to_plain``. Raises like ``step_from_plain``."""
    return LoRARequest(fields[0], fields[1], fields[2], bytes.fromhex(fields[3]))


def _new_to_plain(new: NewRequest) -> dict[str, Any]:
    return {
        "row": new.row,
        "token_ids": new.token_ids,
        "block_ids": new.block_ids,
        "sample_requests": [_request_to_plain(request) for request in new.sample_requests],
        "num_prompt_logprobs": new.num_prompt_logprobs,
        "lora": None if new.lora is None else lora_to_plain(new.lora),
        "pooling": None if new.pooling is None else asdict(new.pooling),
    }


def _new_from_plain(plain: Mapping[str, Any], grammar: Grammar | None) -> NewRequest:
    lora, pooling = plain["lora"], plain["pooling"]
    return NewRequest(
        plain["row"],
        _array("i", plain["token_ids"]),
        tuple(_array("i", table) for table in plain["block_ids"]),
        tuple(_request_from_plain(request, grammar) for request in plain["sample_requests"]),
        num_prompt_logprobs=plain["num_prompt_logprobs"],
        lora=None if lora is None else lora_from_plain(lora),
        pooling=None if pooling is None else PoolingParams(**{**pooling, "task": Task(pooling["task"])}),
    )


def _request_to_plain(request: SampleRequest) -> dict[str, Any]:
    """Leaves out the source of the grammar; keeps only whether there is one."""
    return {
        "params": asdict(replace(request.params, structured=None)),
        "seed": request.seed,
        "num_prompt_tokens": request.num_prompt_tokens,
        "stop_token_ids": sorted(request.stop_token_ids),
        "has_grammar": request.grammar is not None,
        "num_candidates": request.num_candidates,
    }


def _request_from_plain(plain: Mapping[str, Any], grammar: Grammar | None) -> SampleRequest:
    params = {name: _as_tuples(value) for name, value in plain["params"].items()}
    return SampleRequest(
        SamplingParams(**params),
        plain["seed"],
        plain["num_prompt_tokens"],
        frozenset(plain["stop_token_ids"]),
        grammar=grammar if plain["has_grammar"] else None,
        num_candidates=plain["num_candidates"],
    )


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _array(code: str, numbers: "array[int] | Sequence[int]") -> "array[int]":
    return numbers if isinstance(numbers, array) else array(code, numbers)
