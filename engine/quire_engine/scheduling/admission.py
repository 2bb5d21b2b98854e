"""What a request must satisfy to be queued. The router checks the same rules first; an engine trusts nobody."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire_proto.errors import ErrorCode, QuireError, invalid
from quire_proto.sampling import SamplingParams, check_length

from quire_engine.kv.memory import KVCacheManager
from quire_engine.request import Request

if TYPE_CHECKING:
    from quire_engine.scheduling.config import SchedulerConfig

MAX_SALT_BYTES = 32


def check_request(request: Request, config: "SchedulerConfig", memory: KVCacheManager) -> None:
    """Raises ``QuireError`` INVALID, with the limit in its text, for a request that can never be run."""
    if len(request.cache_salt) > MAX_SALT_BYTES:
        raise invalid("cache_salt", f"A cache salt has at most {MAX_SALT_BYTES} bytes.")
    sampling = request.sampling
    limit = min(config.max_model_len, memory.device_pool.num_blocks * memory.block_size)
    check_length(len(request.prompt_token_ids), sampling.max_tokens, limit)
    _check_tokens(request, config.vocab_size)
    _check_history(request)
    _check_width(request, config, memory)
    if sampling.structured is not None and request.grammar is None:
        raise QuireError(ErrorCode.INVALID, "This engine knows no grammars.", param=sampling.structured.param)


def _check_tokens(request: Request, vocab_size: int) -> None:
    sampling = request.sampling
    _check_ids("prompt", request.prompt_token_ids, vocab_size)
    for delivered in request.all_resumed_outputs:
        _check_ids("prompt", delivered.token_ids, vocab_size)
    _check_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias], vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    for word in sampling.bad_words:
        _check_ids("bad_words", word, vocab_size)


def _check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise invalid(param, f"Token ids must be between 0 and {vocab_size - 1}.")


def _check_history(request: Request) -> None:
    indexes = [delivered.index for delivered in request.all_resumed_outputs]
    if len(set(indexes)) < len(indexes) or not all(0 <= index < request.sampling.num_sequences for index in indexes):
        raise invalid("delivered", "Each choice can be delivered once, and there are as many as are drawn.")
    if request.sampling.beam_width and indexes:
        raise invalid("delivered", "Nothing of a beam search is delivered before its end.")
    finished = sum(delivered.finished for delivered in request.all_resumed_outputs)
    if finished == request.sampling.num_sequences:
        raise invalid("delivered", "All choices have been delivered.")
    for delivered in request.all_resumed_outputs:
        if not delivered.finished and len(delivered.token_ids) >= request.sampling.max_tokens:
            raise invalid("max_tokens", "The delivered output has reached max_tokens already.")


def _check_width(request: Request, config: "SchedulerConfig", memory: KVCacheManager) -> None:
    """All outputs of a request run at once, and beams have to fit together, because they advance together."""
    sampling = request.sampling
    if sampling.num_sequences > config.max_num_seqs:
        many = f"{sampling.num_sequences} outputs cannot run at once here; the limit is {config.max_num_seqs}."
        raise invalid(_width_param(sampling), many)
    if sampling.beam_width > config.vocab_size:
        raise invalid("beam_width", f"beam_width must be at most {config.vocab_size}, the tokens that there are.")
    if sampling.beam_width:
        own = memory.num_blocks_for(sampling.max_tokens) + 2  # the blocks that the prompt ends in, and that are parted
        blocks = len(request.prompt_token_ids) // memory.block_size + sampling.beam_width * own
        if blocks > memory.device_pool.num_blocks:
            raise invalid("beam_width", "The engine's KV memory cannot hold so many beams of this length.")


def _width_param(sampling: SamplingParams) -> str:
    if sampling.beam_width:
        return "beam_width"
    return "best_of" if sampling.best_of else "n"
