"""Communication between the ranks of one model: sums, gathers and exchanges of their shards."""
