"""``quire demo``: an answer that survives the death of the engine that writes it."""
