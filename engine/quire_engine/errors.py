"""``ModelError``, and how the engine's commands report errors in one sentence."""


class ModelError(Exception):
    """A model cannot be served. The text is one sentence that names the file or setting at fault, and the problem.
    ``instead`` is what its user can do, without a stop.
    """

    instead = "take another model"


class DamagedFileError(ModelError):
    """A file of a model has no content that the model's own can have, as after a copy that was cut."""

    instead = "copy or download it again"


class LoRAError(ModelError):
    """An adapter cannot be served. The text is one sentence that names the file or setting at fault, and the
    problem.
    """


class LoRANotFoundError(LoRAError):
    """A folder is not there, or has no ``adapter_config.json`` that can be read. Which of these is for the operator
    alone: others could ask which folders there are.
    """


def first_line(error: BaseException) -> str:
    """The first line of the message of ``error``, or its type if it has none, without a stop: torch's messages continue
    with advice to programmers.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
