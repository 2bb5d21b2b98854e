"""``quire chat`` and ``quire complete``: answers of a running server, streamed to the terminal."""
