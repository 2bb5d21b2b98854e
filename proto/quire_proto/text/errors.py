"""The error of a model folder whose text side cannot be used."""


class TokenizerLoadError(ValueError):
    """One sentence that names the file and the problem. It stops the router at start; clients never see it."""
