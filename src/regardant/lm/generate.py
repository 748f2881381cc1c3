"""Text from a language model, one token at a time: prefill, choose, decode, stream.

The prompt is run through the model once, in chunks, into a preallocated key/value cache; from then on each step
runs one token. `Sampling` says how a token is chosen from the model's scores, `generate_ids` yields tokens, and
`Generation` yields the text they spell, whole characters only, up to a stop string.

Settings are checked before anything runs. Refused: settings without a meaning, prompts that are empty or longer
than the model's context, and scores that are not numbers (a token drawn from NaN would be an invention).

Shape legend: B batch (always 1 here), T tokens, V vocabulary.
"""

from __future__ import annotations

import codecs
import dataclasses
import math
import numbers
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from regardant.lm.errors import ContextError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Sequence

    from numpy.typing import NDArray

    from regardant.lm.language_model import LanguageModel

    Scores: TypeAlias = NDArray[np.float64]
    Progress: TypeAlias = Callable[[int, int], None]

FinishReason: TypeAlias = Literal["stop", "eos", "length", "context"]
"""Why a text ended: a stop string, the model's own end token, max_tokens, or the end of the context."""

# Tokens per forward pass of the prompt. Activations grow with it (and with nothing else but the model), so it
# bounds memory; beyond a few hundred rows the matrix products gain no more speed.
PREFILL_CHUNK = 512


# ------------------------------------------------------------------------------------------------- settings


def _require(name: str, value: object, kind: type, expected: str, holds: Callable[[Any], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}; got {value!r}")
    if not holds(value):
        raise UserError(f"{name} must be {expected}; got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The defaults choose the most likely one, every time.

    The steps come in the order, and with the meaning, that they have in transformers: repetition penalty,
    temperature, top-k, top-p, min-p; then one draw. With temperature 0 the penalty alone applies.

    Attributes:
        temperature: what the scores are divided by; 0 takes the highest score and draws nothing.
        top_k: keep the k highest scores, and any equal to the k-th. None keeps all.
        top_p: keep the fewest tokens, most likely first, whose probabilities reach top_p: the nucleus
            (Holtzman et al. 2020). None or 1 keeps all.
        min_p: keep tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024).
            None or 0 keeps all.
        repetition_penalty: positive scores of tokens already read or written are divided by it, negative ones
            multiplied (Keskar et al. 2019). 1 changes nothing.

    Raises:
        UserError: a value outside its range, NaN included. TypeError: a value that is no number.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _require(
            "temperature",
            self.temperature,
            numbers.Real,
            "a finite number of at least 0",
            lambda t: 0 <= t < math.inf,
        )
        if self.top_k is not None:
            _require("top_k", self.top_k, numbers.Integral, "a whole number of at least 1", lambda k: k >= 1)
        if self.top_p is not None:
            _require("top_p", self.top_p, numbers.Real, "above 0 and at most 1", lambda p: 0 < p <= 1)
        if self.min_p is not None:
            _require("min_p", self.min_p, numbers.Real, "between 0 and 1", lambda p: 0 <= p <= 1)
        _require(
            "repetition_penalty",
            self.repetition_penalty,
            numbers.Real,
            "a finite number above 0",
            lambda r: 0 < r < math.inf,
        )


def check_max_tokens(max_tokens: int | None) -> None:
    """Refuse a limit that is neither None (go on to the context's end) nor at least one token.

    Raises:
        UserError: below 1. TypeError: no whole number.
    """
    if max_tokens is not None:
        _require("max_tokens", max_tokens, numbers.Integral, "a whole number of at least 1", lambda n: n >= 1)


def random_generator(seed: int | np.random.Generator | None) -> np.random.Generator:
    """The source of chance: from a seed (the same seed draws the same), a generator as it stands, or the system.

    Raises:
        UserError: a negative seed. TypeError: no whole number.
    """
    if seed is not None and not isinstance(seed, np.random.Generator):
        _require("seed", seed, numbers.Integral, "a whole number of at least 0", lambda s: s >= 0)
    return np.random.default_rng(seed)


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """One stop string, many, or none, as a tuple.

    Raises:
        UserError: an empty string, which would stop everything at once. TypeError: something else than text.
    """
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        if not isinstance(text, str):
            raise TypeError(f"stop must be text or several texts; got {text!r} among them")
        if not text:
            raise UserError("stop must not be empty; got ''")
    return stops


# --------------------------------------------------------------------------------------------- one token's choice


def penalise(scores_V: Scores, ids: Collection[int], penalty: float) -> Scores:
    """Lower the scores of the tokens in `ids`, each once, by the repetition penalty."""
    seen = np.unique(np.asarray(ids, dtype=np.int64))
    scores_V = scores_V.copy()
    held = scores_V[seen]
    scores_V[seen] = np.where(held < 0, held * penalty, held / penalty)
    return scores_V


def keep_top_k(scores_V: Scores, top_k: int) -> Scores:
    """Keep the `top_k` highest scores and any equal to the last of them; −∞ elsewhere."""
    rank = max(len(scores_V) - top_k, 0)
    return np.where(scores_V < np.partition(scores_V, rank)[rank], -np.inf, scores_V)


def keep_top_p(scores_V: Scores, top_p: float) -> Scores:
    """Keep the nucleus: drop, from the least likely up, what all together holds at most 1 − top_p; −∞ there.

    The likeliest token always stays. Of equally likely tokens the one with the lower id is the likelier.
    """
    probabilities_V = _softmax(scores_V)
    # Tokens that are each under an even share of what may go are all going: they need no sorting.
    spare = 1 - top_p
    faint_V = probabilities_V <= spare / len(scores_V)
    rest = np.flatnonzero(~faint_V)
    rising = rest[np.argsort(-probabilities_V[rest], kind="stable")[::-1]]
    mass = probabilities_V[faint_V].sum() + np.cumsum(probabilities_V[rising])
    kept = np.zeros(len(scores_V), dtype=bool)
    kept[rising[mass > spare]] = True
    kept[np.argmax(scores_V)] = True
    return np.where(kept, scores_V, -np.inf)


def keep_min_p(scores_V: Scores, min_p: float) -> Scores:
    """Keep tokens at least `min_p` times as likely as the likeliest; −∞ elsewhere."""
    probabilities_V = _softmax(scores_V)
    return np.where(probabilities_V < min_p * probabilities_V.max(), -np.inf, scores_V)


def probabilities(logits_V: NDArray[Any], sampling: Sampling, ids: Collection[int] = ()) -> Scores:
    """What each token's chance is of being the next.

    Args:
        logits_V: the model's scores, (V,), any floating type; −∞ means never.
        sampling: how to choose.
        ids: tokens that the repetition penalty is to lower.

    Returns:
        float64 probabilities, (V,); at temperature 0 all on one token: of equal scores, the lowest id.

    Raises:
        UserError: scores that hold NaN or +∞, or nothing above −∞.
    """
    scores_V = np.asarray(logits_V, dtype=np.float64)
    if not np.isfinite(scores_V.max(initial=-np.inf)):
        raise UserError(
            f"the model's {len(scores_V)} scores hold NaN or no finite maximum, so no token can be chosen; "
            "its weights may be damaged"
        )
    if sampling.repetition_penalty != 1 and len(ids):
        scores_V = penalise(scores_V, ids, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return np.where(np.arange(len(scores_V)) == np.argmax(scores_V), 1.0, 0.0)
    # With the maximum moved to 0, the probabilities are the same and no temperature can overflow them.
    with np.errstate(over="ignore"):
        scores_V = (scores_V - scores_V.max()) / sampling.temperature
    if sampling.top_k is not None:
        scores_V = keep_top_k(scores_V, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        scores_V = keep_top_p(scores_V, sampling.top_p)
    if sampling.min_p is not None and sampling.min_p > 0:
        scores_V = keep_min_p(scores_V, sampling.min_p)
    return _softmax(scores_V)


def sample(
    logits_V: NDArray[Any], sampling: Sampling, rng: np.random.Generator, ids: Collection[int] = ()
) -> int:
    """Choose one token: arguments and errors as for `probabilities`. Takes one number from `rng`."""
    # The cumulative sum is inverted; "right" passes over tokens of probability 0.
    mass_V = np.cumsum(probabilities(logits_V, sampling, ids))
    return int(np.searchsorted(mass_V, rng.random() * mass_V[-1], side="right"))


def _softmax(scores_V: Scores) -> Scores:
    weights_V = np.exp(scores_V - scores_V.max())
    return np.asarray(weights_V / weights_V.sum())


# --------------------------------------------------------------------------------------------------- tokens


def generate_ids(
    model: LanguageModel,
    prompt_ids: Sequence[int],
    *,
    sampling: Sampling | None = None,
    max_tokens: int | None = None,
    rng: np.random.Generator | None = None,
    progress: Progress | None = None,
) -> Generator[int, None, FinishReason]:
    """Continue a prompt of tokens by tokens. A token is computed when it is asked for, not before.

    Args:
        model: what to run.
        prompt_ids: at least one token id.
        sampling: how to choose; None takes the most likely.
        max_tokens: how many at most; None goes on to the end of the context.
        rng: where chance comes from; None asks the system.
        progress: called with (tokens of the prompt done, tokens of the prompt) after each chunk.

    Returns:
        A generator of ids, an end token included, whose return value says why it ended. Prompt and new tokens
        together never exceed the model's context.

    Memory: one key/value cache for prompt and `max_tokens` (or the whole context), and the activations of
    `PREFILL_CHUNK` tokens.

    Raises:
        ContextError: the prompt alone exceeds the context. UserError: an empty prompt, max_tokens below 1.
    """
    check_max_tokens(max_tokens)
    if not len(prompt_ids):
        raise UserError("the prompt is empty: give it at least one character")
    check_context(model, len(prompt_ids), "prompt")
    room = model.config.context - len(prompt_ids)
    limit = room if max_tokens is None else min(max_tokens, room)
    reason: FinishReason = "length" if limit == max_tokens else "context"
    return _steps(
        model,
        list(prompt_ids),
        sampling or Sampling(),
        limit,
        reason,
        rng or np.random.default_rng(),
        progress,
    )


def check_context(model: LanguageModel, length: int, what: str) -> None:
    """Refuse a text of more tokens than the model has positions for; `what` names it in the sentence.

    Raises:
        ContextError: with both numbers.
    """
    if length > model.config.context:
        raise ContextError(
            f"the {what} has {length} tokens, more than the {model.config.context} that {model.name} can read"
        )


def _steps(
    model: LanguageModel,
    ids: list[int],
    sampling: Sampling,
    limit: int,
    reason: FinishReason,
    rng: np.random.Generator,
    progress: Progress | None,
) -> Generator[int, None, FinishReason]:
    if limit == 0:
        return reason
    prompt_length = len(ids)
    # The last token is chosen but never run, hence one position fewer than tokens.
    cache = model.new_cache(1, prompt_length + limit - 1)
    for start in range(0, prompt_length, PREFILL_CHUNK):
        logits_V = model.step(ids[start : start + PREFILL_CHUNK], cache)
        if progress is not None:
            progress(cache.length, prompt_length)
    while True:
        chosen = sample(logits_V, sampling, rng, ids)
        ids.append(chosen)
        yield chosen
        if chosen in model.tokenizer.eos:
            return "eos"
        if len(ids) == prompt_length + limit:
            return reason
        logits_V = model.step([chosen], cache)


# ----------------------------------------------------------------------------------------------------- text


class TextStream:
    """Bytes in, showable text out: whole characters only, and nothing of a stop string or after it.

    Text that might be the beginning of a stop string is held until it is known to be none, so what comes out does
    not depend on how the bytes were cut. The stop string that is complete first counts; of those that end
    together, the longest.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Begin with nothing; `stops` are texts of at least one character."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, data: bytes) -> str:
        """Take the next bytes; give the text that can be shown now, perhaps none."""
        return self._release(self._decoder.decode(data), final=False)

    def finish(self) -> str:
        """Give what was held. Bytes of an unfinished character become one U+FFFD."""
        return self._release(self._decoder.decode(b"", final=True), final=True)

    def _release(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        shown = len(text) if final else len(text) - self._doubtful(text)
        self._held = text[shown:]
        return text[:shown]

    def _doubtful(self, text: str) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)


class Generation(Iterator[str]):
    """A text as it is being written: iterate for pieces of text, each as soon as it may be shown.

    Attributes:
        prompt_ids: what was read.
        ids: every token chosen so far, an end token included, whether its text was shown or not.
        finish_reason: None while there is more to come; then "stop", "eos", "length" or "context".
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt_ids: Sequence[int],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        rng: np.random.Generator | None = None,
        stops: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> None:
        """Check everything, run nothing yet; arguments and errors as for `generate_ids`."""
        self.prompt_ids = tuple(prompt_ids)
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._tokenizer = model.tokenizer
        self._steps = generate_ids(
            model, self.prompt_ids, sampling=sampling, max_tokens=max_tokens, rng=rng, progress=progress
        )
        self._pieces = self._write(TextStream(stops))

    def __next__(self) -> str:
        return next(self._pieces)

    def text(self) -> str:
        """Write to the end and give all that had not been taken yet, in one piece."""
        return "".join(self)

    def _tokens(self) -> Iterator[int]:
        self.finish_reason = yield from self._steps

    def _write(self, stream: TextStream) -> Iterator[str]:
        for chosen in self._tokens():
            self.ids.append(chosen)
            if chosen in self._tokenizer.eos:
                continue
            if piece := stream.push(self._tokenizer.token_bytes(chosen)):
                yield piece
            if stream.stopped:
                break
        if piece := stream.finish():
            yield piece
        if stream.stopped:
            self.finish_reason = "stop"
