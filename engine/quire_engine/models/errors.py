"""The one error of model folders. Knows nothing else."""


class ModelError(Exception):
    """A model cannot be served. The text is one sentence that names the file or setting at fault, and the problem."""
