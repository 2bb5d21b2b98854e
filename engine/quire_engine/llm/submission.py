"""From a prompt to the request that the engine runs: tokens, seed, grammar, everything checked. Runs nothing."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from quire_proto import sampling
from quire_proto.errors import invalid
from quire_proto.text.bad_words import encode_bad_words
from quire_proto.text.model_text import ModelTokenizer

from quire_engine.llm.params import SamplingParams
from quire_engine.request import Request
from quire_engine.scheduling.admission import check_request
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.structured.compiler import GrammarCompiler


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that the scheduler will accept, and what the caller gave for it."""

    request: Request
    prompt: str | None
    params: SamplingParams


class InputProcessor:
    """Makes the requests of one engine. ``draw_seed`` gives a seed for each that has none."""

    def __init__(
        self,
        text: ModelTokenizer,
        scheduler: Scheduler,
        draw_seed: Callable[[], int],
        grammars: GrammarCompiler,
    ) -> None:
        self._text = text
        self._limits = scheduler.config
        self._memory = scheduler.kv_cache_manager
        self._draw_seed = draw_seed
        self._grammars = grammars
        self._ids = count()
        self._bad_words: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}

    def from_text(self, prompt: str, params: SamplingParams, priority: int) -> PreparedRequest:
        """Continues ``prompt``. Raises ``QuireError``."""
        return self._build(prompt, self._text.encode(prompt, self._limits.max_model_len), params, priority)

    def from_tokens(self, token_ids: Sequence[int], params: SamplingParams, priority: int) -> PreparedRequest:
        """Continues ``token_ids``. Raises ``QuireError``."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._limits.vocab_size):
            raise invalid("prompt", f"Token ids must be between 0 and {self._limits.vocab_size - 1}.")
        return self._build(None, token_ids, params, priority)

    def from_messages(self, messages: list[dict[str, str]], params: SamplingParams, priority: int) -> PreparedRequest:
        """Answers a conversation. Raises ``QuireError``."""
        prompt = self._text.render_chat_text(messages)
        token_ids = self._text.encode_chat(messages, self._limits.max_model_len)
        return self._build(prompt, token_ids, params, priority)

    def _build(
        self, prompt: str | None, token_ids: Sequence[int], params: SamplingParams, priority: int
    ) -> PreparedRequest:
        drawn = self._sampling_params(len(token_ids), params)
        request = Request(
            request_id=str(next(self._ids)),
            prompt_token_ids=array("i", token_ids),
            sampling=drawn,
            priority=priority,
            grammar=None if drawn.structured is None else self._grammars.submit(drawn.structured).result(),
        )
        check_request(request, self._limits, self._memory)
        return PreparedRequest(request, prompt, params)

    def _sampling_params(self, num_prompt: int, params: SamplingParams) -> sampling.SamplingParams:
        for token_id in params.stop_token_ids or ():
            if not 0 <= token_id < self._limits.vocab_size:
                raise invalid("stop_token_ids", f"Token ids must be between 0 and {self._limits.vocab_size - 1}.")
        return params.resolve(
            seed=self._draw_seed(),
            max_output=max(1, self._limits.max_model_len - num_prompt),
            bad_words=self._bad_word_tokens(tuple(params.bad_words)),
        )

    def _bad_word_tokens(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Cached: calls with many prompts mostly have the same words for all."""
        known = self._bad_words.get(words)
        if known is None:
            known = encode_bad_words(words, self._text)
            self._bad_words = {words: known}
        return known
