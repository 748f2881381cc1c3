"""A whole language model on regardant's attention: load one, run it, generate, look inside."""
