"""The life of one request: admit, place, stream, recover, finish."""
