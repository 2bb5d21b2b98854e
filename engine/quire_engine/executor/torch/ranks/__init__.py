"""Several processes that compute one model: rank 0 has the scheduler and says what is computed, the others follow."""
