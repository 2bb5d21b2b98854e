"""What an API key must look like."""

MIN_KEY_CHARACTERS = 16


def check_key(key: str) -> str:
    """The key. Raises ``ValueError``, without it, when it is too short to be one or cannot stand in a header."""
    if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"a key must have at least {MIN_KEY_CHARACTERS} printable ASCII characters and no spaces, "
            "such as `openssl rand -hex 32` prints"
        )
    return key
