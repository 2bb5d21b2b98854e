"""Links to the engines and what is known of each."""
