"""Attention on torch tensors: `attention`, `look`, `scaled_dot_product_attention`, `CausalSelfAttention`.

Importing this needs the extra `torch`. What the names mean is in `front` and `module`.
"""

from regardant.torch.front import attention, look, scaled_dot_product_attention
from regardant.torch.module import CausalSelfAttention

__all__ = ["CausalSelfAttention", "attention", "look", "scaled_dot_product_attention"]
