"""What an autoscaler is told: one number for each model, in the ways in which it may be asked for."""
