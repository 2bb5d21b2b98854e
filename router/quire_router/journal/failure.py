"""How the error that a request ended with is written in its record."""

from quire_proto.errors import ErrorCode, QuireError, internal


def write_failure(error: QuireError) -> str:
    """The error's code and its message."""
    return f"{error.code.name}: {error.message}"


def read_failure(text: str) -> QuireError:
    """The error again; an inner one where the text is not known to be an error."""
    code, separator, message = text.partition(": ")
    if not separator or code not in ErrorCode.__members__:
        return internal()
    return QuireError(ErrorCode[code], message)
