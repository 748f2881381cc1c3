"""What a training is told: the model's shape, by a size's name and by flags, and how it is trained.

`Settings` is plain data: it is written into every checkpoint, and a resumed run is refused if one of its values was
changed. Refused: values outside their range, by the name of their flag.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from regardant.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping


# Width, layers, heads, key/value heads, context, rows of a batch, learning rate. The parameters are those with 4,096
# tokens in the vocabulary.
def _shape(
    width: int, layers: int, heads: int, kv_heads: int, context: int, batch: int, lr: float
) -> dict[str, Any]:
    return {
        "width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads,
        "context": context, "batch": batch, "lr": lr,
    }  # fmt: skip


SIZES = {
    "nano": _shape(64, 2, 2, 2, 128, 32, 3e-3),  # 0.4M
    "micro": _shape(192, 6, 6, 3, 256, 16, 2e-3),  # 3.2M
    "small": _shape(384, 8, 6, 6, 512, 16, 1e-3),  # 16M
    "medium": _shape(640, 12, 10, 10, 1024, 16, 6e-4),  # 62M
    "base": _shape(768, 12, 12, 12, 1024, 32, 6e-4),  # 88M
}
DEFAULT_SIZE = "nano"
_MOST = (1 << 31) - 1  # of anything that is counted
_DEEPEST, _VOCABULARY = 10_000, 1 << 20

# What may differ from one sitting to the next without a number of the loss curve changing.
FREE = frozenset({"checkpoint_every", "keep"})


@dataclasses.dataclass(frozen=True)
class Settings:
    """One training.

    Attributes:
        width, layers, heads, kv_heads: as in `regardant.lm.config.Config`. `ffn`: inside the feed-forward.
        context: tokens of a row. `window`: how many keys a query reaches back over, None for all.
        qk_norm: whether queries and keys are normed. `vocab_size`: tokens of a tokenizer that is trained here.
        batch: rows of a micro-batch. `accumulate`: micro-batches of a step. `steps`: updates in all.
        lr: the highest learning rate. `schedule`: "cosine" or "trapezoid". `warmup`: steps of linear rise.
        weight_decay: on matrices only. `clip`: the longest gradient; 0 for any. `beta2`: AdamW's second average.
        seed: of weights, order and repeated rows. `valid_share`: documents set aside, as a share.
        repeats: the share of rows that hold repeated random tokens instead of text.
        repeat_steps: steps, at the beginning, in which half the rows do.
        dtype: "float32" or "bfloat16", what is computed in; weights and optimiser stay float32.
        device: "cpu", "cuda", ... `recompute`: compute activations again, do not keep them. `compile`: by torch.
        eval_every, heads_every, checkpoint_every: steps between. `eval_rows`: rows of a validation on the way.
        keep: how many checkpoints stay.

    Raises:
        UserError: a value outside its range.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    context: int
    batch: int
    lr: float
    ffn: int
    warmup: int
    window: int | None = None
    qk_norm: bool = False
    vocab_size: int = 4096
    accumulate: int = 1
    steps: int = 1000
    schedule: str = "cosine"
    weight_decay: float = 0.1
    clip: float = 1.0
    beta2: float = 0.95
    seed: int = 0
    valid_share: float = 0.05
    repeats: float = 0.0
    repeat_steps: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    recompute: bool = False
    compile: bool = False
    eval_every: int = 100
    heads_every: int = 200
    checkpoint_every: int = 100
    eval_rows: int = 64
    keep: int = 2

    def __post_init__(self) -> None:
        whole = ("width", "layers", "heads", "kv_heads", "context", "batch", "ffn", "accumulate", "steps")
        for name in (*whole, "eval_every", "heads_every", "checkpoint_every", "eval_rows", "keep"):
            _require(1 <= getattr(self, name) <= _MOST, name, f"from 1 to {_MOST:,}", getattr(self, name))
        _require(self.layers <= _DEEPEST, "layers", f"from 1 to {_DEEPEST:,}", self.layers)
        _require(self.context >= 2, "context", "at least 2", self.context)
        _require(
            self.window is None or 1 <= self.window <= _MOST, "window", f"from 1 to {_MOST:,}", self.window
        )
        _require(
            257 <= self.vocab_size <= _VOCABULARY,
            "vocab_size",
            f"from 257, the bytes and an end, to {_VOCABULARY:,}",
            self.vocab_size,
        )
        _require(self.width % self.heads == 0, "width", f"a multiple of --heads {self.heads}", self.width)
        _require(self.width // self.heads % 2 == 0, "width", "an even number for each head", self.width)
        _require(
            self.heads % self.kv_heads == 0, "heads", f"a multiple of --kv-heads {self.kv_heads}", self.heads
        )
        _require(0 < self.lr < math.inf, "lr", "greater than 0", self.lr)
        for name in ("warmup", "repeat_steps", "seed"):
            _require(0 <= getattr(self, name) <= _MOST, name, f"from 0 to {_MOST:,}", getattr(self, name))
        for name in ("weight_decay", "clip"):
            _require(0 <= getattr(self, name) < math.inf, name, "at least 0", getattr(self, name))
        for name in ("valid_share", "repeats", "beta2"):
            _require(0 <= getattr(self, name) < 1, name, "at least 0 and less than 1", getattr(self, name))
        _require(self.schedule in {"cosine", "trapezoid"}, "schedule", "cosine or trapezoid", self.schedule)
        _require(self.dtype in {"float32", "bfloat16"}, "dtype", "float32 or bfloat16", self.dtype)

    @property
    def tokens_a_step(self) -> int:
        """How many positions one update is made of."""
        return self.batch * self.accumulate * self.context

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return dataclasses.asdict(self)


def _require(condition: bool, name: str, wanted: str, got: object) -> None:  # noqa: FBT001 - reads as a sentence
    if not condition:
        raise UserError(f"--{name.replace('_', '-')} must be {wanted}; got {got}")


def settings(size: str | None, given: Mapping[str, Any]) -> Settings:
    """A size's values, and over them what was given.

    The feed-forward is 8/3 of the width, as Llama's, in steps of 16; the warm-up 1/20 of the steps, 200 at most.

    Raises:
        UserError: a size that has no such name, or a value outside its range.
    """
    size = DEFAULT_SIZE if size is None else size
    if size not in SIZES:
        raise UserError(f"--size must be one of {', '.join(SIZES)}; got {size}")
    values = {**SIZES[size], **given}
    if "heads" in given and "kv_heads" not in given:
        values["kv_heads"] = given["heads"]
    values.setdefault("ffn", max(16, round(values["width"] * 8 / 3 / 16) * 16))
    values.setdefault("warmup", min(200, values.get("steps", Settings.steps) // 20))
    return Settings(**values)


def restored(
    plain: Mapping[str, Any],
    given: Mapping[str, Any],
    size: str | None,
    run: str,
    free: frozenset[str] = FREE,
) -> Settings:
    """The settings of a run that goes on, which what is given now must not contradict, but for those that are `free`.

    Raises:
        UserError: it does; the sentence says what differs.
    """
    before = Settings(**plain)
    now = dict(given)
    if (
        size is not None
    ):  # what a size stands for beside what is given, a number of heads that follows from another too
        whole = settings(size, given)
        now |= {name: getattr(whole, name) for name in SIZES[size]}
    for name, value in given.items():
        try:  # what no training can have is said as such
            dataclasses.replace(before, **{name: value})
        except UserError as error:
            if str(error).startswith(f"--{name.replace('_', '-')} "):
                raise
    for name, value in now.items():
        if name not in free and getattr(before, name) != value:
            what = _flag(name, value) if name in given else f"--size {size}, which has {value}"
            why = (
                ", with which steps already made would have had other learning rates"
                if name == "steps"
                else ""
            )
            raise UserError(
                f"{run} was begun with {_flag(name, getattr(before, name))}; got {what}{why}: "
                "leave it out to go on, or choose another folder"
            )
    return dataclasses.replace(before, **{name: given[name] for name in free & given.keys()})


def _flag(name: str, value: object) -> str:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool) or value is None:
        return flag if value else f"no {flag}"
    return f"{flag} {value}"


def hugging_face_config(
    chosen: Settings, vocab_size: int, bos: int | None, eos: int | None
) -> dict[str, Any]:
    """The `config.json` of the model: Llama's; Mistral's, which is Llama with a window; Qwen3's with normed heads."""
    kind = "qwen3" if chosen.qk_norm else "mistral" if chosen.window else "llama"
    window: dict[str, Any] = {"sliding_window": chosen.window} if chosen.window or kind == "qwen3" else {}
    if kind == "qwen3":
        layer = "sliding_attention" if chosen.window else "full_attention"
        window |= {
            "use_sliding_window": bool(chosen.window),
            "max_window_layers": 0 if chosen.window else chosen.layers,
            "layer_types": [layer] * chosen.layers,
        }
    return {
        "architectures": [{"qwen3": "Qwen3", "mistral": "Mistral", "llama": "Llama"}[kind] + "ForCausalLM"],
        "model_type": kind,
        "hidden_size": chosen.width,
        "intermediate_size": chosen.ffn,
        "num_hidden_layers": chosen.layers,
        "num_attention_heads": chosen.heads,
        "num_key_value_heads": chosen.kv_heads,
        "head_dim": chosen.width // chosen.heads,
        "max_position_embeddings": chosen.context,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        **({"mlp_bias": False} if kind == "llama" else {}),
        "attention_dropout": 0.0,
        "dtype": "float32",
        "bos_token_id": bos,
        "eos_token_id": eos,
        **window,
    }
