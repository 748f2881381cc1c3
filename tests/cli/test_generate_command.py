"""`generate` on the command line: what is printed, and that the settings arrive."""

from __future__ import annotations

import io
import json

import pytest

from regardant.cli import main


@pytest.fixture
def generate(tiny_folder, capsysbinary):
    def run(*arguments):
        assert main(["generate", "--model", str(tiny_folder), *arguments]) == 0
        out, err = capsysbinary.readouterr()
        assert err == b""
        return out.decode()

    return run


@pytest.fixture
def as_data(generate):
    return lambda *arguments: json.loads(generate("--json", *arguments))


def test_the_new_text_is_printed_and_ends_its_line(generate, as_data):
    assert generate("hello", "--max-tokens", "9") == as_data("hello", "--max-tokens", "9")["text"] + "\n"


def test_json_holds_what_is_documented(as_data):
    data = as_data("hello", "--max-tokens", "4", "--stop", "zzz")
    ids, text = data.pop("ids"), data.pop("text")
    assert len(ids) == 4
    assert isinstance(text, str)
    assert len(data.pop("prompt_ids")) == 5
    assert data == {
        "model": "tiny",
        "prompt": "hello",
        "finish_reason": "length",
        "settings": {
            "max_tokens": 4,
            "temperature": 0.0,
            "top_k": None,
            "top_p": None,
            "min_p": None,
            "repetition_penalty": 1.0,
            "seed": None,
            "stop": ["zzz"],
            "chat": False,
            "engine": "numpy",
            "dtype": "float32",
        },
    }


def test_a_text_that_was_drawn_names_its_seed_and_can_be_drawn_again(as_data):
    drawn = as_data("hello", "--temperature", "1.5", "--max-tokens", "20")
    seed = drawn["settings"]["seed"]
    again = as_data("hello", "--temperature", "1.5", "--max-tokens", "20", "--seed", str(seed))
    assert again == drawn
    assert as_data("hello", "--temperature", "1.5", "--max-tokens", "20")["ids"] != drawn["ids"]


def test_stop_strings_end_the_text(as_data):
    whole = as_data("hello", "--max-tokens", "30", "--repetition-penalty", "1.5")["text"]
    stop = whole[4:6]
    cut = as_data(
        "hello", "--max-tokens", "30", "--repetition-penalty", "1.5", "--stop", "zzzz", "--stop", stop
    )
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_the_context_ends_the_text(as_data):
    data = as_data("x" * 1998, "--max-tokens", "9")
    assert len(data["ids"]) == 2
    assert data["finish_reason"] == "context"


def test_chat_puts_the_prompt_into_the_template(as_data):
    plain = as_data("<user>hi<assistant>", "--max-tokens", "1")
    assert as_data("hi", "--chat", "--max-tokens", "1")["prompt_ids"] == plain["prompt_ids"]


@pytest.mark.parametrize("how", ["-", "--file"])
def test_the_prompt_may_come_from_elsewhere(how, as_data, monkeypatch, tmp_path):
    (tmp_path / "prompt.txt").write_bytes("né\n".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("né\n".encode())))
    arguments = ["-"] if how == "-" else ["--file", str(tmp_path / "prompt.txt")]
    assert as_data(*arguments, "--max-tokens", "1")["prompt"] == "né"


def test_an_empty_prompt_without_a_start_token_is_refused(tiny_folder, capsys):
    assert main(["generate", "", "--model", str(tiny_folder)]) == 2
    assert "the prompt is empty: give it at least one character" in capsys.readouterr().err


def test_chat_without_a_template_is_refused(tiny_folder, tmp_path, capsys):
    for file in tiny_folder.iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).symlink_to(file)
    assert main(["generate", "hi", "--chat", "--model", str(tmp_path)]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_smollm2_knows_the_capital_of_france(smollm2_gguf, capsys):
    assert (
        main(["generate", "The capital of France is", "--model", str(smollm2_gguf), "--max-tokens", "1"]) == 0
    )
    assert capsys.readouterr().out == " Paris\n"


@pytest.mark.parametrize("option", ["--top-k", "--top-p", "--min-p"])
def test_narrowing_what_is_never_drawn_is_refused(option, capsys):
    assert main(["generate", "a", option, "1"]) == 2
    _, err = capsys.readouterr()
    assert f"{option} narrows what is drawn, and nothing is at temperature 0: give --temperature too" in err


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch_writes_the_same_text(as_data, dtype):
    ours = as_data("hello", "--max-tokens", "30")
    theirs = as_data("hello", "--max-tokens", "30", "--engine", "torch", "--dtype", dtype)
    assert theirs["ids"] == ours["ids"]
    assert theirs["settings"]["engine"] == "torch"
    assert theirs["settings"]["dtype"] == dtype


def test_torch_in_bfloat16_writes_too(as_data):
    assert len(as_data("hello", "--max-tokens", "5", "--engine", "torch", "--dtype", "bfloat16")["ids"]) == 5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--engine", "jax"], b'load: engine must be "numpy" or "torch"; got \'jax\''),
        (
            ["--dtype", "bfloat16"],
            b'load: dtype must be "float32" or "float64", or engine "torch"; got \'bfloat16\'',
        ),
    ],
)
def test_an_engine_there_is_none_of_is_named_before_a_model_is_loaded(capsysbinary, arguments, sentence):
    assert main(["generate", "--model", "no/such.gguf", "hello", *arguments]) != 0
    assert sentence in capsysbinary.readouterr().err
