"""``quire ps`` and ``quire stop``: the servers that ``quire serve`` runs on this machine for this user."""
