"""How large one request may be that a journal keeps, and how many records it names at once."""

from quire_router.generation import GenerationRequest

MAX_LOG_VALUES = 16_777_216  # values of one request's row: 64 MiB
MAX_SHAPE_CHARACTERS = 65_536  # characters
MAX_PARTS = 1_024
MAX_ORPHANS = 16
TOKENS_PER_NUMBER = 14  # tokens' worth of a number in a tuple, with its part of the tuple


def fits_limits(generation: GenerationRequest) -> bool:
    """Whether the request is small enough to be kept."""
    return len(generation.shape) <= MAX_SHAPE_CHARACTERS and len(generation.parts) <= MAX_PARTS


def request_size(generation: GenerationRequest) -> int:
    """What keeping a request takes, in tokens of 4 bytes, as far as a client can multiply it."""
    params = generation.params
    characters = len(generation.shape) + sum(map(len, generation.stop)) + sum(map(len, generation.parts))
    if params.structured is not None:
        characters += len(params.structured.text)
    numbers = 2 * len(params.logit_bias) + sum(map(len, params.bad_words)) + len(params.stop_token_ids)
    return len(generation.prompt_token_ids) + characters // 4 + TOKENS_PER_NUMBER * numbers
