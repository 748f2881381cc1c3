"""Causal attention that you can see: exact, fast, from one NumPy head to a whole language model."""
