"""KV memory as bookkeeping: which block holds what, for whom."""
