"""How large an answer could get, judged before it is begun. A client can multiply prompts, outputs, tokens and
log-probabilities; each alone has its range, and this bounds their product.
"""

from collections.abc import Sequence

from quire_proto.errors import invalid

from quire_router.generation import GenerationRequest

MAX_OUTPUTS = 128
MAX_VALUES = 2**22  # a hundred megabytes or two as JSON; one output of 131,072 tokens with 20 log-probabilities each


def check_response_size(generations: Sequence[GenerationRequest]) -> None:
    """Raises ``QuireError`` INVALID for a request whose answer could be too large to be kept and written."""
    param = "prompt" if len(generations) > 1 else "n"
    outputs = sum(generation.params.num_sequences for generation in generations)
    if outputs > MAX_OUTPUTS:
        raise invalid(param, f"The request asks for {outputs} outputs in all but at most {MAX_OUTPUTS} are allowed.")
    values = sum(map(_num_values, generations))
    if values > MAX_VALUES:
        raise invalid(
            param if outputs > 1 else "max_tokens",
            f"The answer could hold {values} tokens and log-probabilities but at most {MAX_VALUES} are allowed: "
            "ask for fewer outputs, a smaller max_tokens or fewer log-probabilities.",
        )


def _num_values(generation: GenerationRequest) -> int:
    params, prompt_tokens = generation.params, len(generation.prompt_token_ids)
    output = params.num_sequences * (params.max_tokens + (prompt_tokens if generation.echo else 0))
    return output + generation.num_logprobs(prompt_tokens, params.num_sequences * params.max_tokens)
