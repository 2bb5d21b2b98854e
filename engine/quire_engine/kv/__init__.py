"""KV memory as bookkeeping: which block holds what, for whom. Knows neither tensors nor requests' meaning."""
