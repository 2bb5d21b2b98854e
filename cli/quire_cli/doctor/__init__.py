"""``quire doctor``: what this machine has, and what is missing for serving."""
