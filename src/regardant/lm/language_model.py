"""A language model that is ready to be used: its configuration, weights and tokenizer, and what one does with them.

`regardant.load` makes one. The arrays say where the work happens: NumPy weights compute in NumPy, torch tensors in
torch. Refused: token ids that the model has no row for, and texts longer than its context.

Shape legend: B batch, T tokens, V vocabulary, C width of the residual stream.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from regardant.cache import KVCache
from regardant.lm import generate
from regardant.lm.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    from regardant.lm.config import Config
    from regardant.lm.tokenizer import Tokenizer
    from regardant.runs import Run

# An array of whichever library the weights came in.
Array: TypeAlias = Any
Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LanguageModel:
    """One model, loaded.

    Attributes:
        config: its sizes and options.
        weights: arrays by their names in a Hugging Face checkpoint.
        tokenizer: text to token ids and back.
        name: what to call it in sentences.
        source: the file or folder that it was read from; None if it was made in memory.
    """

    config: Config
    weights: Mapping[str, Array]
    tokenizer: Tokenizer
    name: str
    source: Path | None = None

    def __repr__(self) -> str:
        return f"LanguageModel({self.name!r}, {self.config.family}, {self.config.layers} layers)"

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty key/value cache of this model's shape, for `capacity` positions of each of `batch` texts.

        Memory: 2 · layers · batch · kv_heads · capacity · head_width numbers of the weights' type.
        """
        config = self.config
        return KVCache(
            config.layers, batch, config.kv_heads, capacity, config.head_width, like=self._embedding
        )

    def logits(
        self, ids: str | ArrayLike, *, starts: Sequence[int] | None = None, cache: KVCache | None = None
    ) -> Array:
        """Score every token of the vocabulary as the next, at every position.

        Args:
            ids: token ids, (B, T) or (T,) for one row; or a text, which makes one row.
            starts: of a left-padded batch, the first real position of each row. None: nothing is padded.
            cache: earlier keys and values, to which these are written; it is not advanced.

        Returns:
            Scores before the softmax, (B, T, V), in the weights' own library.

        Memory: the result, and T · width per activation; never T · T.

        Raises:
            UserError: no tokens, ids outside the vocabulary, or starts that do not fit.
            ContextError: more tokens in a row than the model has positions for.
            TypeError: ids that are no whole numbers.
        """
        from regardant.lm import model

        ids_BT = self._checked(self.encode(ids) if isinstance(ids, str) else ids)
        B, T = ids_BT.shape
        past = 0 if cache is None else cache.length
        first = 0 if starts is None else min(_checked_starts(starts, B, past + T))
        generate.check_context(self, past + T - first, "text")
        hidden_BTC = model.forward(
            self._array(ids_BT),
            self.weights,
            self.config,
            starts_B=None if starts is None else self._array(np.asarray(starts, dtype=np.int64)),
            cache=cache,
        )
        return model.logits(hidden_BTC, self.weights, self.config)

    def step(self, ids: Sequence[int], cache: KVCache) -> NDArray[np.float32]:
        """Run one text's next tokens behind what the cache holds, and advance it.

        Args:
            ids: at least one token id.
            cache: of batch 1; afterwards it holds these tokens too.

        Returns:
            The scores after the last of them, (V,), as a NumPy array.
        """
        from regardant.lm import model

        ids_BT = self._checked(ids)
        hidden_B1C = model.forward(self._array(ids_BT), self.weights, self.config, cache=cache, last=1)
        cache.advance(ids_BT.shape[1])
        logits_V: NDArray[np.float32] = _to_numpy(model.logits(hidden_B1C, self.weights, self.config))[0, 0]
        return logits_V

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int | np.random.Generator | None = None,
        stop: str | Sequence[str] | None = None,
        chat: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> generate.Generation:
        """Continue a prompt. Iterate over the result for text as it comes; nothing is run before that.

        Args:
            prompt: a text or token ids; with `chat`, what the user says, or a conversation's messages.
            max_tokens: the most tokens to write; None goes on to the end of the context.
            temperature: 0 takes the likeliest token every time; else one is drawn, the flatter the higher.
            top_k: draw among the k likeliest. `top_p`: among the likeliest that together reach top_p.
            min_p: draw among tokens at least min_p times as likely as the likeliest.
            repetition_penalty: above 1 makes tokens that were read or written less likely.
            seed: the same seed writes the same text; None lets the system choose.
            stop: end before this text, or any of these texts.
            chat: put the prompt into the model's chat template first.
            progress: called with (tokens read, tokens to read) while the prompt is read.

        Returns:
            An iterator of pieces of text, with `.ids` and `.finish_reason`: see `regardant.lm.generate`.

        Raises:
            UserError: a setting outside its range, an empty prompt, `chat` without a template.
            ContextError: a prompt longer than the context. TypeError: something of the wrong kind.
        """
        sampling = generate.Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )
        rng = generate.random_generator(seed)
        stops = generate.stop_strings(stop)
        generate.check_max_tokens(max_tokens)
        return generate.Generation(
            self,
            self.prompt_ids(prompt, chat=chat),
            sampling=sampling,
            max_tokens=max_tokens,
            rng=rng,
            stops=stops,
            progress=progress,
        )

    def look(
        self,
        text: str,
        *,
        layers: Sequence[int] | None = None,
        top: int = 8,
        chat: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Run:
        """Run a text once and keep what every head looked at: see `regardant.lm.run.look`."""
        from regardant.lm import run

        return run.look(self, text, layers=layers, top=top, chat=chat, progress=progress)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the model's tokenizer puts around one."""
        return self.tokenizer.encode(text, special=True)

    def chat_text(self, prompt: str | Sequence[Message]) -> str:
        """What the model's chat template makes of a user's words, or of a conversation, ready to be answered.

        Raises:
            UserError: the model has no chat template, it refuses the messages, or there are none.
            TypeError: messages that are not mappings of "role" and "content" to text.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if not messages:
            raise UserError("the conversation is empty: give it at least one message")
        for message in messages:
            _check_message(message)
        return self.tokenizer.chat(messages, add_generation_prompt=True)

    def prompt_ids(self, prompt: Prompt, *, chat: bool = False) -> list[int]:
        """The token ids that `generate` begins from: at least one.

        Raises:
            UserError: nothing to begin from, ids outside the vocabulary, or no chat template.
            TypeError: neither text nor ids, nor, with `chat`, messages.
        """
        if chat:
            text = self.chat_text(prompt)  # type: ignore[arg-type]  # what is no message is refused there
            return self.tokenizer.encode(text, special=False)
        # What is no id is refused below; a start token alone would be no prompt.
        ids: list[Any] = (self.encode(prompt) if prompt else []) if isinstance(prompt, str) else list(prompt)
        return [int(i) for i in self._checked(ids)[0]] if ids else []

    @property
    def _embedding(self) -> Array:
        return self.weights[
            "transformer.wte.weight" if self.config.family == "gpt2" else "model.embed_tokens.weight"
        ]

    def _array(self, array: NDArray[np.int64]) -> Array:
        from array_api_compat import array_namespace, device

        like = self._embedding
        return array_namespace(like).asarray(array, device=device(like))

    def _checked(self, ids: ArrayLike) -> NDArray[np.int64]:
        """`ids` as (B, T), each with a row in the embedding."""
        try:
            given = np.asarray(ids)
        except ValueError as error:
            raise UserError("ids must be rows of one length; pad them on the left and give starts") from error
        if given.ndim not in {1, 2} or given.size == 0:
            raise UserError(f"ids must be (T,) or (B, T) with at least one token; got shape {given.shape}")
        if not np.issubdtype(given.dtype, np.integer):
            raise TypeError(f"ids must be whole numbers; got {given.dtype}")
        low, high = int(given.min()), int(given.max())
        if low < 0 or high >= self.config.vocab_size:
            raise UserError(
                f"ids must lie between 0 and {self.config.vocab_size - 1} for {self.name}; "
                f"got {low if low < 0 else high}"
            )
        return np.atleast_2d(given).astype(np.int64)


def _check_message(message: object) -> None:
    if not isinstance(message, Mapping):
        raise TypeError(f'chat messages must be mappings of "role" and "content"; got {message!r}')
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise TypeError(f'a chat message must have text under "{key}"; got {message!r}')


def _checked_starts(starts: Sequence[int], rows: int, length: int) -> list[int]:
    firsts = [operator.index(start) for start in starts]
    if len(firsts) != rows or not all(0 <= first <= length for first in firsts):
        raise UserError(f"starts must be {rows} positions between 0 and {length}; got {list(starts)}")
    return firsts


def _to_numpy(array: Array) -> NDArray[np.float32]:
    from array_api_compat import array_namespace, to_device

    xp = array_namespace(array)
    return np.asarray(to_device(xp.astype(array, xp.float32), "cpu"))
