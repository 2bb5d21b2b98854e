"""Files and batches: stored in the journal's place, run behind interactive requests, and continued by any router."""
