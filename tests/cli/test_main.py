"""The command line as a whole, in processes of its own: exit codes, signals, pipes, and how soon it answers."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import sys

import pytest

import regardant
from regardant.cli import main

REGARDANT = [sys.executable, "-m", "regardant"]

HEAVY = {
    "gguf",
    "huggingface_hub",
    "jinja2",
    "rich",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
}


def run(*arguments, **options):
    return subprocess.run([*REGARDANT, *arguments], capture_output=True, check=False, timeout=120, **options)


def start(*arguments, **options):
    return subprocess.Popen(
        [*REGARDANT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


# ------------------------------------------------------------------------------------------------------- help


def test_help_answers_within_half_a_second():
    def seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # The processor's time, so that other tests at the same time do not count.
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize("arguments", [["--help"], ["look", "--help"], ["generate", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys; from regardant.cli import main; code = main(sys.argv[1:]); "
        "print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True)
    assert not HEAVY & set(done.stderr.decode().split())


@pytest.mark.parametrize("command", ["look", "generate", "models"])
def test_every_command_explains_itself(command, capsys):
    assert main([command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_no_command_gives_the_help(capsys):
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"regardant {regardant.__version__}\n"


# --------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frob"], ["No such command", "frob"]),
        (["look", "--tokn", "1"], ["No such option", "--tokn", "--token"]),
        (["look", "x", "--token", "one"], ["--token", "integer"]),
        (["look", "x", "y"], ["unexpected"]),
        (["look", "x", "--model", "smolm2"], ["'smolm2' is not known", "smollm2"]),
        (["look", "x", "--model", "no/such/folder"], ["no/such/folder"]),
        (["generate"], ["nothing to continue"]),
        (["generate", "x", "--temperature", "-1"], ["temperature must be", "got -1.0"]),
        (["generate", "x", "--temperature", "nan"], ["temperature must be", "got nan"]),
        (["generate", "x", "--top-p", "0"], ["top_p must be", "got 0.0"]),
        (["generate", "x", "--top-k", "0"], ["top_k must be", "got 0"]),
        (["generate", "x", "--min-p", "2"], ["min_p must be", "got 2.0"]),
        (["generate", "x", "--repetition-penalty", "0"], ["repetition_penalty must be", "got 0.0"]),
        (["generate", "x", "--max-tokens", "0"], ["max_tokens must be", "got 0"]),
        (["generate", "x", "--seed", "-1"], ["seed must be", "got -1"]),
        (["generate", "x", "--stop", ""], ["stop must not be empty"]),
        (["generate", "--file", "none.txt"], ["cannot read none.txt"]),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, words, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("regardant: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize("command", ["look", "generate"])
def test_an_argument_that_is_not_utf8_names_the_byte(command):
    done = run(command, b"caf\xe9")
    assert done.returncode == 2
    assert done.stderr == b"regardant: the text is not UTF-8: byte 0xE9 at offset 3\n"


@pytest.mark.parametrize("command", ["look", "generate"])
def test_standard_input_that_is_not_utf8_names_the_byte(command):
    done = run(command, "-", input=b"\xff\xfeh")
    assert done.returncode == 2
    assert done.stderr == b"regardant: standard input is not UTF-8: byte 0xFF at offset 0\n"


def test_a_closed_standard_input_is_refused():
    closed = ["sh", "-c", f"{sys.executable} -m regardant look - <&-"]
    done = subprocess.run(closed, capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr == b"regardant: cannot read standard input: it is closed\n"


def test_a_hostile_file_name_makes_no_second_line(capsys):
    assert main(["look", "--file", "a\n\x1b[31mb"]) == 2
    err = capsys.readouterr().err
    assert err == "regardant: cannot read a⟨U+000A⟩⟨U+001B⟩[31mb: no such file or directory\n"


def test_an_endless_file_is_not_read_for_ever():
    done = run("look", "--file", "/dev/zero")
    assert done.returncode == 2
    assert done.stderr == b"regardant: /dev/zero holds more than 64 MiB, more than any model reads\n"


@pytest.mark.parametrize("command", ["look", "generate"])
def test_a_folder_without_a_model_is_refused(command, tmp_path):
    done = run(command, "x", "--model", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["look", "generate"])
def test_a_text_beyond_the_context_is_refused_with_both_numbers(command, tiny_folder, tmp_path):
    done = run(command, "x" * 2001, "--model", str(tiny_folder), cwd=tmp_path)
    assert done.returncode == 2
    assert b"2001 tokens" in done.stderr
    assert b"2000" in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------- signals and streams


def test_an_interrupted_text_ends_its_line_and_exits_with_130(tiny_folder):
    process = start("generate", "hello", "--model", str(tiny_folder), "--max-tokens", "1900")
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"regardant: interrupted\n"
    assert first
    assert rest.endswith(b"\n")


def test_an_interrupted_look_writes_nothing(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = start("look", "--file", str(fifo), cwd=tmp_path)
    with fifo.open("wb"):  # opens once the command has begun to read
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == (b"", b"regardant: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


def test_a_reader_that_goes_away_ends_it_quietly(tiny_folder):
    process = start("generate", "hello", "--model", str(tiny_folder), "--max-tokens", "1900")
    assert process.stdout.read(1)
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


@pytest.mark.parametrize("arguments", [["--help"], ["models"], ["models", "--json"], ["--version"]])
def test_output_that_cannot_be_written_is_said(arguments):
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run([*REGARDANT, *arguments], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr == b"regardant: the output could not be written: no space left on device\n"


def test_closed_streams_are_no_bug():
    command = ["sh", "-c", f"{sys.executable} -m regardant --version >&- 2>&-"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_an_encoding_without_the_characters_gets_them_spelt_out(tiny_folder, tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = run("look", "né", "--model", str(tiny_folder), env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def on_a_terminal(*arguments, **environment):
    """What a person sees: both streams on one terminal."""
    main_end, other_end = pty.openpty()
    process = subprocess.Popen(
        [*REGARDANT, *arguments],
        stdout=other_end,
        stderr=other_end,
        stdin=other_end,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    os.close(other_end)
    seen = b""
    while True:
        try:
            data = os.read(main_end, 4096)
        except OSError:  # how a terminal without writers ends on Linux
            break
        if not data:
            break
        seen += data
    os.close(main_end)
    assert process.wait(timeout=60) == 0, seen
    return seen.decode()


def test_colours_are_for_terminals_that_want_them():
    assert "\x1b[" in on_a_terminal("models")
    assert "\x1b[3" not in on_a_terminal("models", NO_COLOR="1")
    assert b"\x1b" not in run("models").stdout


def test_a_narrow_terminal_loses_the_bars_and_no_number(tiny_folder, tmp_path):
    page = str(tmp_path / "look.html")
    seen = on_a_terminal("look", "abcd", "-m", str(tiny_folder), "-o", page, COLUMNS="50", NO_COLOR="1")
    assert "█" not in seen
    # Four tokens and what is not listed, the first token, the one that gave most: seven pairs.
    assert seen.count(" %") == 14


def test_a_person_is_told_why_the_text_ended(tiny_folder):
    arguments = ["generate", "hello", "--model", str(tiny_folder), "--max-tokens", "5"]
    assert "5 tokens" in on_a_terminal(*arguments)
    assert "ended by --max-tokens" in on_a_terminal(*arguments)
    assert run(*arguments).stderr == b""


# --------------------------------------------------------------------------------------------------- the rest


def test_models_are_listed(capsys):
    assert main(["models"]) == 0
    assert "smollm2" in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [set(entry) for entry in entries] == [{"name", "what", "bytes", "cached"}] * len(entries)
    assert "smollm2" in [entry["name"] for entry in entries]


def test_without_the_extra_one_sentence_says_what_to_install():
    hide = (
        "import sys; sys.modules['typer'] = None; from regardant.cli import main; sys.exit(main(['--help']))"
    )
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "regardant: the command line needs typer, which the extra brings: python -m pip install 'regardant[lm]'\n"
    )
