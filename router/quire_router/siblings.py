"""The state that the prompts of one request share."""

from dataclasses import dataclass


@dataclass(slots=True)
class PromptGroup:
    """One for all prompts of a request that run here. Its answer has ``begun`` once the client was told anything of it,
    so that the client may come back for each of them. Once one ``failed`` for good nobody comes back for the others.
    """

    begun: bool = False
    failed: bool = False
