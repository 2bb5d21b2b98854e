"""``quire-engine bench``: the engine beside its peers, in one run."""
