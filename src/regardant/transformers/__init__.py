"""Any Hugging Face decoder on regardant: importing this registers attn_implementation="regardant"."""

from transformers import AttentionInterface, AttentionMaskInterface

from regardant.transformers.interface import attention_forward
from regardant.transformers.masks import mask

AttentionInterface.register("regardant", attention_forward)
AttentionMaskInterface.register("regardant", mask)
