"""Which tokens the next step computes, and what its results mean."""
