"""What a request must satisfy to be queued. The router checks the same rules first; an engine trusts nobody."""

from quire_proto.errors import invalid
from quire_proto.sampling import check_length

from quire_engine.kv.memory import KvMemory
from quire_engine.request import Request
from quire_engine.scheduling.config import SchedulerConfig

MAX_SALT_BYTES = 32


def check_request(request: Request, config: SchedulerConfig, memory: KvMemory) -> None:
    """Raises ``QuireError`` INVALID, with the limit in its text, for a request that can never be run."""
    if len(request.cache_salt) > MAX_SALT_BYTES:
        raise invalid("cache_salt", f"A cache salt has at most {MAX_SALT_BYTES} bytes.")
    limit = min(config.max_model_len, memory.device.num_blocks * memory.block_size)
    check_length(len(request.prompt_token_ids), request.sampling.max_tokens, limit)
    for tokens in (request.prompt_token_ids, request.output_token_ids):
        if tokens and not (min(tokens) >= 0 and max(tokens) < config.vocab_size):
            raise invalid("prompt", f"Token ids must be between 0 and {config.vocab_size - 1}.")
    if len(request.output_token_ids) >= request.sampling.max_tokens:
        raise invalid("max_tokens", "The delivered output has reached max_tokens already.")
