"""``quire list``, ``quire pull`` and ``quire rm``: the models on this machine that were downloaded."""
