"""Runs in a process of their own: crashes, hangs, noise and errors are findings, and the rest still run."""

import textwrap

import pytest

from regardant.conformance import select, verdict
from regardant.conformance.runner import run
from regardant.conformance.target import UnknownTarget

TROUBLE = """
    import os, signal, sys, time
    import regardant

    def attention(q, k, v, *, causal=True, offset=None, window=None, scale=None, mask=None):
        print("noise", flush=True)
        sys.stdout.write("{}\\n")
        if window == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if window is not None:
            print("the reason", file=sys.stderr)
            os._exit(7)
        if scale is not None:
            time.sleep(1000)
        if mask is not None:
            raise RuntimeError("no\\nmasks")
        return regardant.attention(q, k, v, causal=causal, offset=offset)

    def wrong(q, k, v, *, causal=True, offset=None):
        return regardant.attention(q, k, v, causal=causal, offset=0)

    broken = 3
"""


@pytest.fixture
def trouble(tmp_path, monkeypatch):
    (tmp_path / "trouble.py").write_text(textwrap.dedent(TROUBLE))
    (tmp_path / "dies.py").write_text("import os; os._exit(3)")
    monkeypatch.chdir(tmp_path)
    return "trouble:attention"


def test_a_crash_a_hang_and_an_error_are_findings_and_the_rest_still_run(trouble):
    names = (
        "window/of-one,window/width,scale/given,mask/polarity,alignment/square,alignment/offset,lse/natural"
    )
    report = run(trouble, select(names), limit_s=20)
    found = {one.case: one for one in report.verdicts}
    assert found["window/of-one"].verdict == verdict.CRASHED
    assert "SIGSEGV" in found["window/of-one"].detail
    assert found["window/width"].verdict == verdict.CRASHED
    assert "exit status 7; the last that it said: the reason" in found["window/width"].detail
    assert found["scale/given"].verdict == verdict.TIMED_OUT
    assert "no answer within 20 s" in found["scale/given"].detail
    assert found["mask/polarity"].verdict == verdict.FAILED
    assert found["mask/polarity"].detail == "raised RuntimeError: no masks"
    assert found["alignment/square"].verdict == verdict.PASSED
    assert found["alignment/offset"].verdict == verdict.PASSED
    assert found["lse/natural"].verdict == verdict.NOT_OFFERED
    assert not report.is_clean
    assert report.counts[verdict.CRASHED] == 2


def test_a_failure_says_what_came_what_was_right_and_where(trouble):
    target = trouble.replace("attention", "wrong")
    (found,) = run(target, select("alignment/fewer-queries")).verdicts
    assert found.verdict == verdict.FAILED
    assert found.detail.startswith("call 1 of 2: out[0, 0, 0, 0] is ")
    assert "right is" in found.detail
    assert "256 of 256 wrong" in found.detail
    assert found.cause == "causal mask aligned top-left"


def test_a_file_is_a_target_too(trouble):
    del trouble
    assert run("trouble.py:attention", select("alignment/square")).is_clean


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nothing", "a target must be module:function"),
        ("nothing:attention", "there is no module 'nothing'"),
        ("trouble:nothing", "trouble has no function 'nothing'"),
        ("trouble:broken", "trouble has no function 'broken'"),
        ("nothing.py:attention", "no such file"),
        ("dies:attention", "cannot be imported: the process ended with exit status 3"),
    ],
)
def test_a_target_that_cannot_be_found_is_refused(trouble, target, says):
    del trouble
    with pytest.raises(UnknownTarget, match=says):
        run(target, select("alignment/square"))


def test_builtin_targets_tell_their_versions():
    report = run("regardant", select("alignment/square"))
    assert report.is_clean
    assert set(report.versions) == {"numpy", "regardant"}
