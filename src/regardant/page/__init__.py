"""The page: what a look saw, as one HTML file that a browser opens without a network.

It draws plain data (text, numbers, arrays) and refuses to know where they came from: nothing here imports a
model, a tokenizer or torch.
"""

from regardant.page.export import render

__all__ = ["render"]
