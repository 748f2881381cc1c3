"""Training: text in; out comes a run folder that transformers and `regardant.load` read, and that can go on."""
