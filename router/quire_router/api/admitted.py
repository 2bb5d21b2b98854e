"""``PreparedRequest``: a request whose answer can be written, whether it is new or came earlier."""

from dataclasses import dataclass

from quire_proto.text.model_text import ModelTokenizer

from quire_router.api.shape import ResponseOptions
from quire_router.generation import GenerationRequest


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One generation for each of the request's prompts (at least one), the shape of its answer, and the text side of
    its model. The events of its stream have ids where ``event_ids`` were asked for. ``ignored`` are the parameters that
    it named and that change nothing.
    """

    generations: tuple[GenerationRequest, ...]
    response_options: ResponseOptions
    text: ModelTokenizer
    event_ids: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def first(self) -> GenerationRequest:
        """The first prompt's; the others differ from it in prompt, id and seed."""
        return self.generations[0]

    @property
    def num_choices(self) -> int:
        """How many choices the answer has: those of all prompts, in order."""
        return len(self.generations) * self.first.params.n
