"""Any Hugging Face decoder on regardant, and watched: importing this registers attn_implementation="regardant".

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="regardant")
    with regardant.transformers.watch(model, tokenizer=tokenizer) as w:
        model.generate(**inputs)

`watch` leaves what every head looked at, for every token that was read or generated, without eager attention and
without a T × S matrix (see `regardant.transformers.watching`). What a model may ask of attention and what is refused
stands in `regardant.transformers.interface`.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from regardant.transformers.interface import attention_forward
from regardant.transformers.keeping import LayerLook
from regardant.transformers.masks import mask
from regardant.transformers.watching import Watch, watch

__all__ = ["LayerLook", "Watch", "watch"]

AttentionInterface.register("regardant", attention_forward)
AttentionMaskInterface.register("regardant", mask)
