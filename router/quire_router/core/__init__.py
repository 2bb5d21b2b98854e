"""What every package of the router speaks: requests, cursors, delta streams, errors, metrics, retries."""
