"""The tokenizer gives transformers' ids, names tokens readably, and places them in the text.

`tokenizer_vectors.json` holds llama.cpp's own test vectors (models/ggml-vocab-*.gguf.inp and .out, MIT), each
vocabulary cut down to the tokens that occur in the texts.
"""

# ruff: noqa: RUF001 - characters that look alike are the point

import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from checkpoints import write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from regardant.lm.errors import LoadError, UserError
from regardant.lm.tokenizer import ChatError, Tokenizer

VECTORS = json.loads(Path(__file__).with_name("tokenizer_vectors.json").read_text(encoding="utf-8"))

PAGE = """\
def f(x: int) -> str:
\t\"\"\"Doc: “quotes”, ‘single’ — dash…\"\"\"
    return f"{x:>10}" if x != 0 else 'zero'   # trailing   spaces   \n
for (int i = 0; i < 1000000; ++i) { a[i] ^= 0xDEADBEEF; }
Emoji 😀 👍🏽 👨\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 ✅ 🇪🇪
Accents: naïve café Ångström Žluťoučký kůň; decomposed e\u0301 n\u0303
Digits 3.14159 2023-01-31 1,234,567.89 100% 1e-5 007 v2.0.1 4x4
中文字符，日本語テキスト、한국어 문장。 Русский текст, ελληνικά, עברית, العربية, हिन्दी
I'm you're he'll WE'VE they'd don't 'S 's it’s rock'n'roll
Spaces:  two   three    four          ten\ttab\t\ttabs\r\nCRLF\r\n\r\n  end \u00a0nbsp \u200bzero \ufeffmark
<|im_start|>user\nhi<|im_end|> <|endoftext|> <s> </s> <unk> <|begin_of_text|> <think>x</think>
https://example.com/a?b=c&d=e#f  user@example.org  C:\\path\\to\\file  $E=mc^2$ \\frac{1}{2}
"""


def gguf_metadata(**fields):
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def tiny(**changes):
    """Metadata of a byte-level vocabulary: <|end|> and the 256 letters, and "th"."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["<|end|>", *letters, "th"],
        "token_type": [3] + [1] * 257,
        "merges": ["t h"],
        "eos_token_id": 0,
    }
    return gguf_metadata(**{name: value for name, value in (fields | changes).items() if value is not None})


@pytest.fixture(scope="module")
def smollm2_tokenizers(smollm2, smollm2_gguf):
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    return smollm2.tokenizer, theirs


# ------------------------------------------------------------------------------------------------- same ids


@pytest.mark.parametrize(
    "text", [PAGE, *PAGE.splitlines(keepends=True), "", " ", "\n\n\n", "    ", "\x00\x7f"]
)
def test_smollm2_gives_the_ids_of_transformers(smollm2_tokenizers, text):
    ours, theirs = smollm2_tokenizers
    ids = theirs(text)["input_ids"]
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids) == text
    assert b"".join(map(ours.token_bytes, ids)) == text.encode()


def test_smollm2_cuts_numerals_of_every_script_one_by_one(smollm2):
    # transformers cuts a GGUF's text as GPT-2 did; SmolLM2's own tokenizer.json has Digits before that, which shows
    # beyond 0 to 9 only. The steps are its, the vocabulary is the file's.
    texts = ["½ cup, x² and ٣٤٥ or १२३", "Ⅷ ① ³", "12 ½3"]
    backend = tokenizers.Tokenizer(models.BPE(*_vocabulary(smollm2.tokenizer)))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    for text in texts:
        assert smollm2.tokenizer.encode(text) == backend.encode(text).ids, text
    assert smollm2.tokenizer.pieces(smollm2.tokenizer.encode("4 ½ 78")) == ["4", " ", "½", " ", "7", "8"]


def _vocabulary(tokenizer):
    model = json.loads(tokenizer._backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def test_smollm2_lays_out_a_chat_as_transformers_does(smollm2_tokenizers):
    ours, theirs = smollm2_tokenizers
    messages = [
        {"role": "user", "content": "Hi <there> & é"},
        {"role": "assistant", "content": "Yo"},
        {"role": "user", "content": "{{ 1 + 1 }}"},
    ]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert ours.chat(messages, add_generation_prompt=prompt) == expected
    assert ours.has_chat
    assert ours.eos == {theirs.eos_token_id}
    assert ours.bos == theirs.bos_token_id
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_of_llama_cpp(name):
    fields = {key: value for key, value in VECTORS[name].items() if key != "vectors"}
    tokenizer = Tokenizer.from_gguf(gguf_metadata(**fields))
    vectors = VECTORS[name]["vectors"]
    assert len(vectors) == 45
    for text, ids in vectors:
        assert tokenizer.encode(text, special=False) == ids, text
        assert tokenizer.decode(ids) == text
        # SentencePiece puts a space before every text, and its tokens keep it.
        prefix = b" " if name == "llama-spm" else b""
        assert b"".join(map(tokenizer.token_bytes, ids)) == prefix + text.encode()


def test_qwen2_composes_accents_as_its_tokenizer_json_does():
    fields = {key: value for key, value in VECTORS["qwen2"].items() if key != "vectors"}
    tokenizer = Tokenizer.from_gguf(gguf_metadata(**fields))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_llama3_begins_with_bos_unless_the_file_says_otherwise():
    bos = {"bos_token_id": 0, "pre": "llama-bpe"}
    assert Tokenizer.from_gguf(tiny(**bos)).encode("th") == [0, 257]
    assert Tokenizer.from_gguf(tiny(**bos)).encode("th", special=False) == [257]
    assert Tokenizer.from_gguf(tiny(**bos, add_bos_token=False)).encode("th") == [257]
    both = tiny(**bos, add_eos_token=True, pre_token=None)
    assert Tokenizer.from_gguf(both).encode("th") == [0, 257, 0]
    assert Tokenizer.from_gguf(tiny()).encode("th") == [257]


def test_sentencepiece_without_a_space_in_front():
    fields = {key: value for key, value in VECTORS["llama-spm"].items() if key != "vectors"}
    plain = Tokenizer.from_gguf(gguf_metadata(**fields, add_space_prefix=False))
    for text in ("Hello world", " Hello", "é😀\n"):
        ids = plain.encode(text, special=False)
        assert plain.decode(ids) == text
        assert b"".join(map(plain.token_bytes, ids)) == text.encode()


def test_special_tokens_in_the_text_stay_whole():
    tokenizer = Tokenizer.from_gguf(tiny())
    ids = tokenizer.encode("th<|end|>th")
    assert ids == [257, 0, 257]
    assert tokenizer.decode(ids) == "th<|end|>th"
    assert tokenizer.decode(ids, special=False) == "thth"
    assert tokenizer.token_bytes(0) == b"<|end|>"


# --------------------------------------------------------------------------------------------- tokenizer.json


def test_a_folder_gives_the_ids_and_chat_of_transformers(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}', encoding="utf-8")
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "bos_token_id": 1}', encoding="utf-8")
    ours = Tokenizer.from_file(tmp_path / "tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.encode(PAGE) == theirs(PAGE)["input_ids"]
    assert ours.decode(ours.encode(PAGE)) == PAGE
    assert ours.eos == {0, 3, 4, 5}
    assert ours.bos == 1
    messages = [{"role": "user", "content": "Hi"}]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.chat(messages) == expected == "<|user|>Hi<|end|><|assistant|>"


def test_where_a_chat_template_may_be(tmp_path):
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    write_tokenizer(tmp_path, chat_template=templates, eos_token={"content": "<|end|>", "lstrip": False})
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert tokenizer.chat([]) == "yes"
    assert tokenizer.eos == {0}
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert Tokenizer.from_file(tmp_path / "tokenizer.json").chat([]) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert not tokenizer.has_chat
    with pytest.raises(ChatError, match="has no chat template"):
        tokenizer.chat([])


def test_older_folders_keep_special_tokens_in_a_file_of_their_own(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}', encoding="utf-8")
    assert Tokenizer.from_file(tmp_path / "tokenizer.json").eos == {0}


def test_spans_keep_the_space_whatever_the_post_processor(tmp_path):
    write_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "The trophy 😀 fit"
    byte_level = tokenizers.processors.ByteLevel(trim_offsets=True)
    for post in (None, byte_level, tokenizers.processors.Sequence([byte_level])):
        if post is not None:
            backend.post_processor = post
        backend.save(str(tmp_path / "tokenizer.json"))
        ids, spans = (tokenizer := Tokenizer.from_file(tmp_path / "tokenizer.json")).spans(text)
        assert ids == tokenizer.encode(text)
        for index, (start, end) in zip(ids, spans, strict=True):
            raw = tokenizer.token_bytes(index)
            assert text[start:end].encode() == raw or (
                text[start:end].strip() == "😀" and raw in " 😀".encode()
            )


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for", "does not accept"),
        ("{{ messages[0]['role'] }}", "does not accept"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 + 'a' }}", "does not accept"),
        ("{{ 1 / 0 }}", "does not accept"),
        ("{% for i in range(10**9) %}x{% endfor %}", "does not accept"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "does not accept"),
    ],
)
def test_a_template_that_refuses_or_misbehaves_gives_one_sentence(template, sentence):
    tokenizer = Tokenizer.from_gguf(tiny() | {"tokenizer.chat_template": template})
    with pytest.raises(ChatError, match=sentence):
        tokenizer.chat([])


def test_what_templates_may_use():
    template = (
        "{{ bos_token }}|{{ messages | tojson }}|{{ strftime_now('%Y') | length }}\n"
        "{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}"
    )
    tokenizer = Tokenizer.from_gguf(tiny(bos_token_id=1) | {"tokenizer.chat_template": template})
    assert tokenizer.chat([{"content": "<é>"}]) == '!|[{"content": "<é>"}]|4\n1'


# ------------------------------------------------------------------------------------------------- readable


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b" the", " the"),
        (b"\n", "⏎"),
        (b"\r\n\t", "␍⏎⇥"),
        (b"\xe2", "⟨E2⟩"),
        (b"a\xf0\x9f", "a⟨F0⟩⟨9F⟩"),
        ("é😀".encode(), "é😀"),
        ("\u202e\u200b\x1b\x00".encode(), "⟨U+202E⟩⟨U+200B⟩⟨U+001B⟩⟨U+0000⟩"),
        (b"</script>", "</script>"),
    ],
)
def test_pieces_are_readable(raw, shown):
    letters = {byte: letter for letter, byte in _letters().items()}
    token = "".join(letters[byte] for byte in raw)
    metadata = tiny()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], token]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    tokenizer = Tokenizer.from_gguf(metadata)
    index = tokenizer._backend.token_to_id(token)
    assert tokenizer.token_bytes(index) == raw
    assert tokenizer.pieces([index]) == [shown]


def _letters():
    """Find bytes' letters by asking the tokenizers package: all bytes that occur in UTF-8 text."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    points = [*range(0x800), *range(0x1000, 0xD000, 0x1000), *range(0x10000, 0x110000, 0x10000)]
    spelled = {chr(point): byte_level.pre_tokenize_str(chr(point))[0][0] for point in points}
    pairs = [zip(letters, text.encode(), strict=True) for text, letters in spelled.items()]
    return dict(pair for several in pairs for pair in several)


def test_rows_of_the_embedding_beyond_the_tokenizer_stand_for_nothing():
    tokenizer = Tokenizer.from_gguf(tiny())
    assert tokenizer.token_bytes(999) == b""
    assert tokenizer.pieces([999]) == ["⟨999⟩"]
    with pytest.raises(ValueError, match="at least 0; got -1"):
        tokenizer.token_bytes(-1)


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer.from_gguf(tiny())


@settings(deadline=None)
@given(text=st.text())
def test_any_text_comes_back_whole(byte_level, text):
    ids, spans = byte_level.spans(text)
    assert ids == byte_level.encode(text)
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()
    assert "".join(text[start:end] for start, end in sorted(set(spans))) == text


# ------------------------------------------------------------------------------------------------- refusals


def test_text_that_is_no_text():
    tokenizer = Tokenizer.from_gguf(tiny())
    with pytest.raises(UserError, match="character 3 is half a surrogate pair"):
        tokenizer.encode("abc\ud800")
    with pytest.raises(TypeError, match="text must be a string; got bytes"):
        tokenizer.encode(b"abc")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not implemented; known are smollm, gpt-2"),
        ({"pre": None}, "does not say how to cut text"),
        ({"model": "t5"}, "tokenizer.ggml.model 't5' is not implemented"),
        ({"model": None}, "tokenizer.ggml.model None is not implemented"),
        ({"tokens": None}, "holds no vocabulary"),
        ({"tokens": 3}, "tokens must be a list of str"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["t q"]}, "merge 't q' is of tokens that are not in the vocabulary"),
        ({"merges": ["th"]}, "merge 'th' is of tokens"),
        ({"token_type": [1, 2]}, "258 tokens have 2 entries in tokenizer.ggml.token_type"),
        ({"eos_token_id": 258}, "eos_token_id 258 lies outside the 258 tokens"),
        ({"bos_token_id": "x"}, "bos_token_id 'x' lies outside"),
        ({"model": "llama", "merges": None}, "neither scores nor merges"),
        (
            {"model": "llama", "merges": None, "scores": [0.5]},
            "258 tokens have 1 entries in tokenizer.ggml.scores",
        ),
    ],
)
def test_vocabularies_that_are_refused(changes, sentence):
    with pytest.raises(LoadError, match=f"^a.gguf: .*{sentence}"):
        Tokenizer.from_gguf(tiny(**changes), "a.gguf")


def test_tokenizer_files_that_are_refused(tmp_path):
    file = tmp_path / "tokenizer.json"
    with pytest.raises(LoadError, match=r"tokenizer.json: there is no such file"):
        Tokenizer.from_file(file)
    for content in (b"", b"{", b"{}", b"\xff", b'{"model": 3}'):
        file.write_bytes(content)
        with pytest.raises(LoadError, match=r"tokenizer.json: is not a tokenizer that can be read"):
            Tokenizer.from_file(file)
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))  # noqa: S106 - no password
    backend.decoder = decoders.WordPiece()
    backend.save(str(file))
    with pytest.raises(LoadError, match="kind WordPiece with decoder WordPiece is not implemented"):
        Tokenizer.from_file(file)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1", encoding="utf-8")
    with pytest.raises(LoadError, match=r"tokenizer_config.json: is not valid JSON"):
        Tokenizer.from_file(file)
    (tmp_path / "tokenizer_config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(LoadError, match=r"tokenizer_config.json: must hold a JSON object; got list"):
        Tokenizer.from_file(file)
