"""Which tokens the next step computes, and what its results mean. Knows neither torch nor grpc."""
