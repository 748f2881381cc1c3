"""Measurements against peers: each checks its answer, prints the error beside the time, and runs both in one go."""
