"""Text to token ids and back, by the model's own tokenizer, plus what a page needs: names and places of tokens.

The work is done by Hugging Face's `tokenizers`, from a `tokenizer.json` or from a GGUF file's own vocabulary:
byte-level BPE with the pre-tokenizers of SmolLM, GPT-2, Llama 3 and Qwen2, and SentencePiece-style BPE with scores
and byte fallback (Llama 2, Mistral). Ids are those of transformers for the same model.

Refused: other kinds of vocabulary and other pre-tokenizers, by name; text that has no UTF-8 form; a chat without a
chat template. A template is run in Jinja's sandbox and gets nothing but the messages and the special tokens.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regardant.lm.checkpoint import read_json
from regardant.lm.errors import LoadError, UserError
from regardant.names import readable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import tokenizers

# GGUF's tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# The patterns of the original tokenizer.json files.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# GGUF's tokenizer.ggml.pre: whose way of cutting text before merging.
_PRE_TOKENIZERS = {
    "smollm": "smollm",
    "gpt-2": "gpt-2",
    "default": "gpt-2",
    "llama-bpe": "llama3",
    "llama-v3": "llama3",
    "llama3": "llama3",
    "qwen2": "qwen2",
}

_SPACE = "\u2581"  # SentencePiece writes a space as this


class ChatError(UserError):
    """The model has no chat template, or its template does not accept these messages."""


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: what cuts and merges.
        bos: id of the token that begins a text, if there is one.
        eos: ids of the tokens that end one.
        chat_template: a Jinja template as transformers has it, or None.
        special: the texts of the special tokens by role ("bos_token", ...), for the template.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos: int | None = None,
        eos: Iterable[int] = (),
        chat_template: str | None = None,
        special: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._byte_level = _is_byte_level(backend)
        self._added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
        self._chat_template = chat_template
        self._special = dict(special or {})
        self.bos = bos
        self.eos = frozenset(eos)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json`, and beside it what there is of tokenizer_config.json, chat_template.jinja,
        generation_config.json and config.json.

        Raises:
            LoadError: a file is missing, damaged or of a kind that is not implemented.
        """  # noqa: D205 - the names do not fit one line
        from tokenizers import Tokenizer as Backend

        path = Path(path)
        if not path.is_file():
            raise LoadError(
                f"{path}: there is no such file, and without it text cannot be turned into tokens"
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the package raises nothing more specific
            raise LoadError(f"{path}: is not a tokenizer that can be read: {error}") from None
        try:
            return cls._with_siblings(backend, path.parent)
        except _KindError as error:
            raise LoadError(f"{path}: {error}") from None

    @classmethod
    def _with_siblings(cls, backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
        files = ("special_tokens_map.json", "tokenizer_config.json", "config.json", "generation_config.json")
        old, settings, *configs = (read_json(folder / name, optional=True) for name in files)
        special = _special_texts({**old, **settings})
        bos = [backend.token_to_id(special.get("bos_token", ""))] + [
            config.get("bos_token_id") for config in configs
        ]
        eos = [backend.token_to_id(special.get("eos_token", ""))] + [
            config.get("eos_token_id") for config in configs
        ]
        _keep_spaces_in_spans(backend)
        return cls(
            backend,
            bos=next(iter(_ids(bos)), None),
            eos=_ids(eos),
            chat_template=_chat_template(folder, settings),
            special=special,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], where: str = "GGUF file") -> Tokenizer:
        """Build the tokenizer that a GGUF file's metadata describes.

        Raises:
            LoadError: the vocabulary is missing or damaged, or of a kind that is not implemented.
        """
        fields = {
            key.removeprefix("tokenizer.ggml."): value
            for key, value in metadata.items()
            if key.startswith("tokenizer.ggml.")
        }
        try:
            backend = _backend_from_gguf(fields)
        except _KindError as error:
            raise LoadError(f"{where}: {error}") from None
        tokens = fields["tokens"]
        roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {role: fields.get(f"{name}_token_id") for role, name in roles.items()}
        return cls(
            backend,
            bos=ids["bos_token"],
            eos=[index for index in (ids["eos_token"], fields.get("eot_token_id")) if index is not None],
            chat_template=template
            if isinstance(template := metadata.get("tokenizer.chat_template"), str)
            else None,
            special={role: tokens[index] for role, index in ids.items() if index is not None},
        )

    # ------------------------------------------------------------------------------------------ text to ids

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Turn text into ids. `special` adds what the model wants at a text's ends (its bos token, say).

        Special tokens that are written out in the text count as such either way, as in transformers.

        Raises:
            UserError: the text holds half a surrogate pair, which no UTF-8 has.
        """
        return list(self._encode(text, special=special).ids)

    def spans(self, text: str, *, special: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        """Turn text into ids, and say which characters [start, end) of it each stands for.

        Tokens that share a character (its bytes are split among them) all have that character's range; a token
        that was added has an empty one.
        """
        encoding = self._encode(text, special=special)
        return list(encoding.ids), list(encoding.offsets)

    def _encode(self, text: str, *, special: bool) -> tokenizers.Encoding:
        if not isinstance(text, str):
            raise TypeError(f"text must be a string; got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"text cannot be written as UTF-8: character {error.start} is half a surrogate pair"
            ) from None
        return self._backend.encode(text, add_special_tokens=special)

    # ------------------------------------------------------------------------------------------ ids to text

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Turn ids into text; bytes that are not UTF-8 become U+FFFD. `special=False` leaves special tokens out."""
        return str(self._backend.decode(list(map(int, ids)), skip_special_tokens=not special))

    def token_bytes(self, index: int) -> bytes:
        """Give the bytes that one token stands for: of a special token, its text.

        A model's embedding may have more rows than its tokenizer has tokens; those stand for no bytes.
        """
        if index < 0:
            raise ValueError(f"token id must be at least 0; got {index}")
        if index in self._added:
            return self._added[index].encode()
        token = self._backend.id_to_token(int(index))
        if token is None:
            return b""
        return _from_byte_letters(token) if self._byte_level else _from_sentencepiece(token)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Name tokens readably (see `regardant.names`); one that stands for no bytes by its number, "⟨7⟩"."""
        return [
            readable(self.token_bytes(index).decode("utf-8", errors="surrogateescape")) or f"⟨{index}⟩"
            for index in ids
        ]

    # ------------------------------------------------------------------------------------------------- chat

    @property
    def has_chat(self) -> bool:
        """Whether the model comes with a chat template."""
        return self._chat_template is not None

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Lay out messages ({"role": ..., "content": ...}) as the model was taught to read them.

        Encode the result with `special=False`: the template writes the special tokens itself.

        Raises:
            ChatError: there is no template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise ChatError("this model has no chat template; give it plain text instead")
        import jinja2

        try:
            values = {**self._special, "messages": messages, "add_generation_prompt": add_generation_prompt}
            return str(_template(self._chat_template).render(values))
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            raise ChatError(f"the model's chat template does not accept these messages: {error}") from None


# What a template's own expressions can come to, besides Jinja's errors: it is a stranger's program.
_TEMPLATE_FAULTS = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    MemoryError,
    RecursionError,
)


class _KindError(ValueError):
    """A vocabulary that cannot be used; whoever knows the file's name completes the sentence."""


def _special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Give the texts of the special tokens by role; a file holds each as it is, or in an object."""
    named = {role: value for role, value in settings.items() if role.endswith("_token")}
    texts = {
        role: value.get("content") if isinstance(value, dict) else value for role, value in named.items()
    }
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _ids(fields: Iterable[object]) -> list[int]:
    """Give the ids in fields of which each may hold one, several or none."""
    several = [field if isinstance(field, list) else [field] for field in fields]
    return [index for ids in several for index in ids if isinstance(index, int)]


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja goes first, as in transformers; a list of named templates has one named "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    return template if isinstance(template, str) else None


@functools.lru_cache(maxsize=4)
def _template(source: str) -> Any:  # a jinja2.Template
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(layout: str) -> str:
        return dt.datetime.now().astimezone().strftime(layout)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    # The settings, functions and filter that transformers gives to templates: they are written for these.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(source)


# ------------------------------------------------------------------------------------------ kinds of vocabulary


def cut_name(path: Path) -> str:
    """GGUF's name for the way in which a `tokenizer.json` cuts text before merging.

    Raises:
        LoadError: it has none that is known here.
    """
    stored = read_json(path)
    for name in dict.fromkeys({way: name for name, way in reversed(_PRE_TOKENIZERS.items())}.values()):
        way = _PRE_TOKENIZERS[name]
        if _same_cut(stored, way):
            return name
    raise LoadError(
        f"{path}: cuts text before merging in a way that GGUF has no name for here; "
        f"known are {', '.join(_PRE_TOKENIZERS)}"
    )


def _same_cut(stored: Mapping[str, Any], way: str) -> bool:
    made, normal = _cut(way)
    ours, theirs = (json.loads(made.__getstate__()), stored.get("pre_tokenizer"))
    normalizer = stored.get("normalizer")
    same_model = stored.get("model", {}).get("type") == "BPE"
    same_merges = bool(stored.get("model", {}).get("ignore_merges")) == (way == "llama3")
    return (
        same_model
        and same_merges
        and _plain(ours) == _plain(theirs)
        and (normalizer is None) == (normal is None)
    )


def _plain(cut: Any) -> Any:
    """A pre-tokenizer as JSON, without what moves offsets alone."""
    if isinstance(cut, dict):
        return {key: _plain(value) for key, value in cut.items() if key != "trim_offsets"}
    return [_plain(value) for value in cut] if isinstance(cut, list) else cut


def _cut(way: str) -> tuple[Any, Any]:
    """How text is cut before merging, and what it is normalised by first, or None."""
    from tokenizers import normalizers, pre_tokenizers

    if way == "smollm":
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
        return pre_tokenizers.Sequence(steps), None
    if way == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False), None
    return _split(_LLAMA3 if way == "llama3" else _QWEN2), normalizers.NFC() if way == "qwen2" else None


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Tell how tokens spell bytes: in GPT-2's letters (True) or as SentencePiece does (False)."""
    from tokenizers import decoders, models

    if isinstance(backend.decoder, decoders.ByteLevel):
        return True
    if isinstance(backend.model, models.BPE) and isinstance(
        backend.decoder, decoders.Sequence | decoders.Metaspace
    ):
        return False
    kinds = type(backend.model).__name__, type(backend.decoder).__name__
    raise _KindError(f"a tokenizer of kind {kinds[0]} with decoder {kinds[1]} is not implemented")


def _keep_spaces_in_spans(backend: tokenizers.Tokenizer) -> None:
    """Make spans cover a token's leading space, as the token does; by default some tokenizers trim it."""
    from tokenizers import processors

    post = backend.post_processor
    steps = [post] if isinstance(post, processors.ByteLevel) else []
    if isinstance(post, processors.Sequence):
        steps = [step for step in iter(post) if isinstance(step, processors.ByteLevel)]
    for step in steps:
        step.trim_offsets = False


def _backend_from_gguf(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    kind, tokens = fields.get("model"), _list(fields, "tokens", str)
    if not tokens:
        raise _KindError("holds no vocabulary: tokenizer.ggml.tokens is missing")
    for role in ("bos", "eos", "eot", "unknown", "padding"):
        index = fields.get(f"{role}_token_id", 0)
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise _KindError(
                f"tokenizer.ggml.{role}_token_id {index!r} lies outside the {len(tokens)} tokens"
            )
    if kind == "gpt2":
        backend, bos_by_default = _byte_level_from_gguf(fields)
    elif kind == "llama":
        backend, bos_by_default = _sentencepiece_from_gguf(fields), True
    else:
        raise _KindError(f"tokenizer.ggml.model {kind!r} is not implemented; known are gpt2 and llama")
    _add_special_tokens(backend, fields)
    _add_ends(backend, fields, bos_by_default=bos_by_default)
    return backend


def _list(fields: Mapping[str, Any], name: str, kind: type, length: int | None = None) -> list[Any]:
    """Give a field that is a list, checked; one that is missing counts as empty."""
    values = fields.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise _KindError(f"is damaged: tokenizer.ggml.{name} must be a list of {kind.__name__}")
    if length is not None and len(values) not in {0, length}:
        raise _KindError(f"is damaged: {length} tokens have {len(values)} entries in tokenizer.ggml.{name}")
    return values


def _byte_level_from_gguf(fields: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    name = fields.get("pre")
    if name is None:
        raise _KindError(
            "does not say how to cut text (tokenizer.ggml.pre), as files did not before April 2024; convert it anew"
        )
    if name not in _PRE_TOKENIZERS:
        raise _KindError(
            f"tokenizer.ggml.pre {name!r} is not implemented; known are {', '.join(_PRE_TOKENIZERS)}"
        )
    way = _PRE_TOKENIZERS[name]
    vocabulary = {token: index for index, token in enumerate(fields["tokens"])}
    # Llama 3 takes a word that is in the vocabulary whole, whatever its merges would make of it.
    backend = Backend(models.BPE(vocabulary, _merges(fields, vocabulary), ignore_merges=way == "llama3"))
    backend.pre_tokenizer, normalizer = _cut(way)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    return backend, way == "llama3"


def _split(pattern: str) -> Any:  # a tokenizers.pre_tokenizers.PreTokenizer
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _merges(fields: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in _list(fields, "merges", str):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise _KindError(f"is damaged: merge {merge!r} is of tokens that are not in the vocabulary")
        merges.append((left, right))
    if not merges:
        raise _KindError("is damaged: tokenizer.ggml.merges is missing")
    return merges


def _sentencepiece_from_gguf(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    tokens = fields["tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _merges(fields, vocabulary) if fields.get("merges") else _merges_from_scores(fields, vocabulary)
    unknown = tokens[fields.get("unknown_token_id", 0)]
    backend = Backend(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = fields.get("add_space_prefix", True)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence(([normalizers.Prepend(_SPACE)] if prefix else []) + spaces)
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return backend


def _merges_from_scores(fields: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first: SentencePiece keeps no list of merges."""
    scores = _list(fields, "scores", float, len(fields["tokens"]))
    if not scores:
        raise _KindError("holds neither scores nor merges of its tokens")
    found = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_special_tokens(backend: tokenizers.Tokenizer, fields: Mapping[str, Any]) -> None:
    """Keep whole, wherever they stand in a text, what the file marks as control, unknown or user-defined."""
    from tokenizers import AddedToken

    kinds = _list(fields, "token_type", int, len(fields["tokens"]))
    marked = [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(fields["tokens"], kinds, strict=bool(kinds))
        if kind in {_UNKNOWN, _CONTROL, _USER_DEFINED} and token
    ]
    backend.add_tokens(marked)


def _add_ends(backend: tokenizers.Tokenizer, fields: Mapping[str, Any], *, bos_by_default: bool) -> None:
    """Have a text begin with bos and end with eos where the file says so, or llama.cpp does in its place."""
    from tokenizers import processors

    ends = {
        role: fields.get(f"{role}_token_id")
        for role, wanted in (
            ("bos", fields.get("add_bos_token", bos_by_default)),
            ("eos", fields.get("add_eos_token", False)),
        )
        if wanted
    }
    pairs = {role: (fields["tokens"][index], index) for role, index in ends.items() if index is not None}
    if pairs:
        texts = [*(pairs[role][0] for role in pairs if role == "bos"), "$A"]
        texts += [pairs[role][0] for role in pairs if role == "eos"]
        backend.post_processor = processors.TemplateProcessing(
            single=texts, special_tokens=list(dict.fromkeys(pairs.values()))
        )


# -------------------------------------------------------------------------------------------- bytes of a token


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """Each byte as the letter that GPT-2 writes it as (Radford et al. 2019): itself where that shows."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


def _from_byte_letters(token: str) -> bytes:
    letters = _byte_of_letter()
    if all(letter in letters for letter in token):
        return bytes(letters[letter] for letter in token)
    return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    if len(token) == len("<0x00>") and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(_SPACE, " ").encode()
