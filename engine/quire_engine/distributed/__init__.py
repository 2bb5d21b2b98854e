"""What ranks of one model do together: sums and gathers over their shards."""
