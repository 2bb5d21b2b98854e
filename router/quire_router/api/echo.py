"""The prompt's text before each choice's own, where a request asks for it back."""

import asyncio
from collections.abc import AsyncGenerator, Container, Sequence
from contextlib import aclosing
from dataclasses import replace

from quire_proto.text.detokenizer import REPLACEMENT
from quire_proto.text.model_text import ModelTokenizer
from quire_proto.text.output import OutputTextStream

from quire_router.generation import Delta, GenerationRequest

_TOKENS_PER_TURN = 256  # tokens: a millisecond or two


async def with_prompt_echo(
    deltas: AsyncGenerator[Delta],
    generations: Sequence[GenerationRequest],
    text: ModelTokenizer,
    begun: Container[int] = (),
) -> AsyncGenerator[Delta]:
    """The same pieces, but the first of each choice begins with its prompt, unless the reader of the answer has
    ``begun`` it. Closes ``deltas``.
    """
    prompts: dict[int, str] = {}
    opened: set[int] = set()
    n = generations[0].params.n
    async with aclosing(deltas):
        async for delta in deltas:
            if delta.index in opened or delta.index in begun:
                yield delta
                continue
            opened.add(delta.index)
            number = delta.index // n
            if number not in prompts:
                prompts[number] = await _prompt_text(generations[number], text)
            yield replace(delta, text=prompts[number] + delta.text, replayed=False)


async def _prompt_text(generation: GenerationRequest, text: ModelTokenizer) -> str:
    """What the tokens of the prompt say. Lets other work go on meanwhile."""
    output = text.new_output_stream((), (), skip_special_tokens=generation.skip_special_tokens)
    parts = []
    for start in range(0, len(generation.prompt_token_ids), _TOKENS_PER_TURN):
        parts.append(output.push(generation.prompt_token_ids[start : start + _TOKENS_PER_TURN]))
        await asyncio.sleep(0)
    return "".join(parts) + withheld(output)


def withheld(output: OutputTextStream) -> str:
    """The end of a prompt's text, but for a character that it ends inside of: that is the output's."""
    return output.finish().rstrip(REPLACEMENT)
