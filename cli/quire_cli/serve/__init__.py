"""``quire serve``: a router and its engines as one tree of processes with one log."""
