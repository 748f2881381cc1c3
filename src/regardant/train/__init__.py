"""Training: text in, a run folder out that transformers and `regardant.load` read, and that goes on where it stopped."""
