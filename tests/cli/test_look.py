"""`look` on the command line: what it prints, which token it asks, and what it refuses before any work."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest

from regardant.cli import look, main, terminal
from regardant.lm.errors import UserError
from regardant.writing import replacing


@dataclasses.dataclass(frozen=True)
class Token:
    index: int
    id: int
    text: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Source:
    token: Token
    weight: float
    written: float


class Run:
    """A run whose tokens are the given ones and whose chosen token drew evenly on all up to itself."""

    model_name = "fake"
    fails: BaseException | None = None

    def __init__(self, text: str, pieces: list[str]) -> None:
        self.text, self.tokens, start = text, [], 0
        for index, piece in enumerate(pieces):
            self.tokens.append(Token(index, index + 100, piece, start, start + len(piece)))
            start += len(piece)

    def sources(self, token, top):
        seen = token + 1
        items = [Source(t, 1 / seen, 1 / seen) for t in self.tokens[:seen][:top]]
        rest = 1 - len(items) / seen
        return types.SimpleNamespace(
            token=self.tokens[token],
            items=items,
            sink=1 / seen,
            sink_written=1 / seen,
            rest=rest,
            rest_written=rest,
        )

    def save(self, path, *, focus, progress):
        with replacing(path) as temporary:
            temporary.write_text(f"page of {self.text}, focus {focus}")
            progress(1, 2)
            if self.fails is not None:
                raise self.fails


@pytest.fixture
def model(monkeypatch, tmp_path):
    """Stand in for loading: a model whose tokens are words with the space before them, in an empty folder."""

    class Model:
        config = types.SimpleNamespace(layers=3)
        calls = []  # noqa: RUF012 - of this one test
        fails = None

        def encode(self, text):
            return text.split(" ")

        def look(self, text, **options):
            self.calls.append((text, options))
            run = Run(text, text.replace(" ", "\0 ").split("\0"))
            run.fails = self.fails
            return run

    fake = Model()
    monkeypatch.setattr(terminal, "open_model", lambda _: fake)
    monkeypatch.chdir(tmp_path)
    return fake


# -------------------------------------------------------------------------------------------------- what it shows


def test_it_names_the_tokens_the_chosen_one_drew_from(model, capsys, tmp_path):
    assert main(["look", "one two three four", "--token", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [line.split() for line in out.splitlines()]
    assert ["1", "one", "0", "33.3", "%", "█" * 20, "33.3", "%"] in rows
    assert ["3", "three", "2", "33.3", "%", "█" * 20, "33.3", "%"] in rows
    assert not any("four" in row for row in rows)
    assert (tmp_path / "look.html").read_text() == "page of one two three four, focus 2"
    assert "look.html" in out
    assert "\x1b" not in out
    assert model.calls == [
        ("one two three four", {"layers": None, "chat": False, "progress": terminal._ignore})
    ]


@pytest.mark.usefixtures("model")
def test_what_is_not_listed_is_said(capsys):
    assert main(["look", "a b c d", "--top", "1"]) == 0
    out, _ = capsys.readouterr()
    assert ["all", "that", "is", "not", "listed", "75.0", "%", "75.0", "%"] in [
        line.split() for line in out.splitlines()
    ]


@pytest.mark.usefixtures("model")
def test_without_a_text_it_shows_its_example_and_says_so(capsys):
    assert main(["look"]) == 0
    out, _ = capsys.readouterr()
    assert look.EXAMPLE_TEXT in out
    assert "example" in out
    assert f"“{look.EXAMPLE_WORD}”" in out


@pytest.mark.usefixtures("model")
def test_the_last_token_is_asked_if_none_is_named(capsys):
    assert main(["look", "one two three", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token"]["index"] == 2


@pytest.mark.usefixtures("model")
def test_json_is_all_that_is_printed_and_holds_what_is_documented(capsys, tmp_path):
    assert main(["look", "one two é\u202e", "--top", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.isascii()
    third = {"index": 2, "id": 102, "text": " é\u202e", "start": 7, "end": 10}
    first = {"index": 0, "id": 100, "text": "one", "start": 0, "end": 3}
    data = json.loads(out)
    assert data.pop("rest") == {"weight": pytest.approx(2 / 3), "written": pytest.approx(2 / 3)}
    assert data == {
        "model": "fake",
        "text": "one two é\u202e",
        "tokens": [first, {"index": 1, "id": 101, "text": " two", "start": 3, "end": 7}, third],
        "token": third,
        "sources": [{"token": first, "weight": 1 / 3, "written": 1 / 3}],
        "sink": {"weight": 1 / 3, "written": 1 / 3},
        "page": None,
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("model")
def test_json_writes_a_page_where_it_is_told_to(capsys, tmp_path):
    assert main(["look", "a b", "--json", "--out", "x.html"]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == "x.html"
    assert (tmp_path / "x.html").exists()


@pytest.mark.usefixtures("model")
def test_token_text_reaches_the_terminal_inert(capsys):
    assert main(["look", "a\x1b[31m \x1b]0;x\x07 \u202eb [red]c[/red]"]) == 0
    out, _ = capsys.readouterr()
    assert not set(out) & set("\x1b\x07\u202e")
    assert "⟨U+202E⟩b" in out
    assert "[red]c[/red]" in out


@pytest.mark.parametrize("arguments", [["--token", "9"], ["--word", "zebra"], ["--layers", "7"]])
def test_a_mistake_is_found_before_the_text_is_run(arguments, model, capsys):
    assert main(["look", "a b", *arguments]) == 2
    assert model.calls == []
    capsys.readouterr()


@pytest.mark.usefixtures("model")
def test_it_says_which_word_gave_most_besides_the_first_token_and_itself(capsys):
    assert main(["look", "a b c"]) == 0
    out, _ = capsys.readouterr()
    assert "The first token, “a”, is where heads rest that look for nothing: 33.3 % / 33.3 %." in out
    assert "Of the earlier tokens listed, most was written from “b”: 33.3 % / 33.3 %." in out


def test_layers_and_chat_are_passed_on(model, capsys):
    assert main(["look", "a b", "--layers", "1-2,0", "--chat"]) == 0
    assert model.calls[0][1]["layers"] == [0, 1, 2]
    assert model.calls[0][1]["chat"] is True
    capsys.readouterr()


# ------------------------------------------------------------------------------------------------ which token


def find(text, pieces, word):
    run = Run(text, pieces)
    return look.find_word(run.text, run.tokens, word)


def test_a_word_is_found_where_it_stands_last_by_itself():
    pieces = ["it", " is", " fit", ",", " it", " sits", " in", " a", " suit", "case"]
    assert find("".join(pieces), pieces, "it") == (4, "")
    assert find("".join(pieces), pieces, " it ") == (4, "")


def test_of_a_word_of_several_tokens_the_last_is_asked_and_that_is_said():
    index, remark = find("my suitcase is", ["my", " suit", "case", " is"], "suitcase")
    assert index == 2
    assert remark == "'suitcase' is 2 tokens, 'suit' + 'case'; the last one is asked"


def test_a_word_that_stands_only_inside_others_is_found_and_that_is_said():
    assert find("suitcases fit", ["suit", "cases", " fit"], "it") == (
        2,
        "'it' stands only inside longer words",
    )


def test_several_words_are_found_too():
    assert find("a b c d", ["a", " b", " c", " d"], "b c")[0] == 2


def test_a_word_of_split_characters_is_found():
    text = "x 😀"
    tokens = [Token(0, 0, "x", 0, 1), Token(1, 1, " ⟨F0⟩", 1, 3), Token(2, 2, "⟨9F⟩", 2, 3)]
    assert look.find_word(text, tokens, "😀")[0] == 2


def test_a_word_is_not_a_pattern():
    with pytest.raises(UserError, match=r"does not hold the word '\.\*'"):
        find("abc", ["abc"], ".*")


@pytest.mark.parametrize(
    ("text", "layers"),
    [("0", [0]), ("0-2", [0, 1, 2]), ("4,1", [1, 4]), ("1-3,2-4", [1, 2, 3, 4]), (" 1 - 2 , 4 ", [1, 2, 4])],
)
def test_layers_are_numbers_and_ranges(text, layers):
    assert look.parse_layers(text, 5) == layers


@pytest.mark.parametrize(
    "text", ["", "x", "1-", "-1", "1,,2", "1-2-3", "5", "0-5", "3-1", "99999999999999999999"]
)
def test_other_layers_are_refused(text):
    with pytest.raises(UserError, match="--layers must"):
        look.parse_layers(text, 5)


def test_a_token_is_named_as_people_read_it():
    pieces = ["The", " suit", "case", ",", "   ", "\n"]
    run = Run("".join(pieces), pieces)
    names = [look.name_of(run.text, token) for token in run.tokens]
    assert names == ["The", "suit", "…case", ",", "␠␠␠", "⟨U+000A⟩"]


# --------------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([""], "the text is empty: give it at least one character"),
        (["a b", "--token", "2"], "--token must lie between -2 and 1, as the text has 2 tokens; got 2"),
        (["a b", "--token", "-3"], "--token must lie between -2 and 1, as the text has 2 tokens; got -3"),
        (["a b", "--word", "zebra"], "the text does not hold the word 'zebra'"),
        (["a b", "--word", " "], "--word must not be empty"),
        (["a b", "--word", "a", "--token", "0"], "give --token or --word, not both"),
        (["a b", "--top", "0"], "--top must be at least 1; got 0"),
        (["a b", "--layers", "0-3"], "--layers must lie between 0 and 2, first to last; got '0-3'"),
        (["a b", "--file", "x"], "give the text itself or --file, not both"),
        (["--file", "none.txt"], "cannot read none.txt: no such file or directory"),
        (["--file", "."], "cannot read .: is a directory"),
        (["a b", "--out", "none/look.html"], "cannot write none/look.html: no such file or directory"),
        (["a b", "--out", "."], "cannot write .: it is a folder"),
        (["a b", "--out", "/proc/look.html"], "cannot write /proc/look.html: no such file or directory"),
    ],
)
@pytest.mark.usefixtures("model")
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, sentence, capsys, tmp_path):
    assert main(["look", *arguments]) == 2
    out, err = capsys.readouterr()
    assert err == f"regardant: {sentence}\n"
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("model")
def test_a_file_that_is_not_utf8_names_the_byte(capsys, tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\u00e9 noir".encode("latin-1"))
    assert main(["look", "--file", "latin.txt"]) == 2
    assert capsys.readouterr().err == "regardant: latin.txt is not UTF-8: byte 0xE9 at offset 3\n"


@pytest.mark.usefixtures("model")
def test_an_empty_file_is_refused(capsys, tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"\n")
    assert main(["look", "--file", "empty.txt"]) == 2
    assert "the text is empty" in capsys.readouterr().err


def test_the_break_at_a_files_end_is_left_out_and_no_other(model, capsys, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\n a b\r\n\r\n")
    assert main(["look", "--file", "a.txt"]) == 0
    assert model.calls[0][0] == "\n a b\r\n"
    capsys.readouterr()


# -------------------------------------------------------------------------------------------------- its page


def test_an_interruption_leaves_the_old_page_and_nothing_else(model, capsys, tmp_path):
    (tmp_path / "look.html").write_text("old")
    model.fails = KeyboardInterrupt()
    assert main(["look", "a b"]) == 130
    assert capsys.readouterr().err == "regardant: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["look.html"]
    assert (tmp_path / "look.html").read_text() == "old"


def test_a_full_disk_is_said_and_leaves_the_old_page(model, capsys, tmp_path):
    (tmp_path / "look.html").write_text("old")
    model.fails = OSError(28, "No space left on device")
    assert main(["look", "a b"]) == 2
    assert capsys.readouterr().err == "regardant: cannot write look.html: no space left on device\n"
    assert [path.name for path in tmp_path.iterdir()] == ["look.html"]
    assert (tmp_path / "look.html").read_text() == "old"


@pytest.mark.usefixtures("model")
def test_a_page_behind_a_link_is_replaced_and_the_link_stays(capsys, tmp_path):
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "look.html").symlink_to("real.html")
    assert main(["look", "a b"]) == 0
    assert (tmp_path / "look.html").is_symlink()
    assert "page of a b" in (tmp_path / "real.html").read_text()
    capsys.readouterr()


@pytest.mark.usefixtures("model")
def test_a_device_is_written_to_and_not_replaced(capsys):
    assert main(["look", "a b", "--out", "/dev/null"]) == 0
    with open("/dev/null", "rb") as null:  # noqa: PTH123
        assert null.read() == b""
    capsys.readouterr()


def test_a_bug_of_ours_shows_itself(model):
    model.fails = ValueError("attention: k must be (B, G, S, 64)")
    with pytest.raises(ValueError, match="attention: k must be"):
        main(["look", "a b"])


def test_smollm2_in_the_example_draws_on_the_sheep(smollm2_gguf, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["look", "--model", str(smollm2_gguf)]) == 0
    out, _ = capsys.readouterr()
    assert "Of the earlier tokens listed, most was written from “sheep”" in out
    assert (tmp_path / "look.html").stat().st_size > 10_000
    assert main(["look", "--model", str(smollm2_gguf), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["text"] == look.EXAMPLE_TEXT
    for share in ("weight", "written"):
        total = sum(source[share] for source in data["sources"]) + data["rest"][share]
        assert total == pytest.approx(1, abs=1e-5)
