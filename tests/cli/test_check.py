"""`regardant check`: exit status, the table, JSON, pages, and mistakes."""

import json
import subprocess
import sys

import pytest

from regardant.cli import main

WRONG = """
import regardant

def attention(q, k, v, *, causal=True, window=None):
    return regardant.attention(q, k, v, causal=causal, window=None if window is None else window + 1)
"""


@pytest.fixture
def wrong(tmp_path, monkeypatch):
    (tmp_path / "wrong_window.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    return "wrong_window:attention"


def test_all_well_is_exit_code_0(capsys):
    assert main(["check", "regardant", "--cases", "alignment/*,heads/grouped"]) == 0
    out = capsys.readouterr().out
    assert "alignment/square" in out
    assert "10 passed" in out
    assert "failed" not in out


def test_a_failure_is_exit_code_1_with_its_diagnosis(wrong, capsys):
    assert main(["check", wrong, "--cases", "window/width,alignment/square,mask/polarity"]) == 1
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "failed" in lines["window/width"]
    assert "right is" in lines["window/width"]
    assert "likely cause: window one key too wide" in lines["window/width"]
    assert "passed" in lines["alignment/square"]
    assert "not offered" in lines["mask/polarity"]
    assert "mask" in lines["mask/polarity"]


def test_json_has_everything(wrong, capsys):
    assert main(["check", wrong, "regardant", "--cases", "window/width,mask/polarity", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    mine, ours = data["targets"]
    assert (mine["target"], ours["target"]) == (wrong, "regardant")
    assert mine["counts"]["failed"] == mine["counts"]["not offered"] == 1
    assert ours["counts"]["passed"] == 2
    failed = next(case for case in mine["cases"] if case["case"] == "window/width")
    assert set(failed) == {"case", "verdict", "detail", "cause", "seconds", "convention"}
    assert failed["cause"] == "window one key too wide"


def test_pages_stand_by_themselves(wrong, capsys):
    arguments = ["check", wrong, "regardant", "--cases", "window/width,mask/polarity"]
    assert main([*arguments, "--html", "report.html", "--markdown", "report.md"]) == 1
    assert "window one key too wide" in capsys.readouterr().out
    with open("report.html", encoding="utf-8") as file:  # noqa: PTH123
        page = file.read()
    assert "window one key too wide" in page
    assert f"regardant check {wrong} --cases window/width" in page
    assert "http" not in page
    with open("report.md", encoding="utf-8") as file:  # noqa: PTH123
        text = file.read()
    assert "| window/width | ✗ | ✓ |" in text
    assert "| mask/polarity | – | ✓ |" in text
    assert f"`regardant check {wrong} --cases window/width`" in text


def test_the_cases_are_listed(capsys):
    assert main(["check", "--list", "--cases", "heads"]) == 0
    assert "heads/grouped" in capsys.readouterr().out
    assert main(["check", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) >= 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["name what to check"]),
        (["regardant", "--cases", "nothing"], ["no case is named 'nothing'", "--list"]),
        (["nowhere:f"], ["cannot import nowhere"]),
        (["regardant", "--html", "no/such/folder/x.html"], ["cannot write"]),
        (["regardant", "--limit", "0"], ["--limit"]),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, words, capsys):
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_what_a_target_prints_is_not_taken_for_a_result(tmp_path):
    (tmp_path / "loud.py").write_text(
        "print('{}')\n" + WRONG.replace("def attention", "print('[]')\n\ndef attention")
    )
    command = [
        sys.executable,
        "-m",
        "regardant",
        "check",
        "loud:attention",
        "--cases",
        "alignment/square",
        "--json",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["targets"][0]["counts"]["passed"] == 1
