"""What others import: the cases as parameters of their own tests."""

import subprocess
import sys

SUITE = """
import numpy as np
import pytest
from regardant.conformance import cases, select

def attention(q, k, v, *, causal=True):
    s = q @ k.repeat(q.shape[1] // k.shape[1], axis=1).swapaxes(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True) @ v.repeat(q.shape[1] // v.shape[1], axis=1)

@pytest.mark.parametrize("case", select("alignment,heads/grouped,window/width"), ids=str)
def test_attention(case):
    case.check(attention)

def test_all_of_them_are_there():
    assert len(list(cases)) == len(cases) >= 60
"""


def test_a_suite_passes_skips_and_fails(tmp_path):
    (tmp_path / "test_mine.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-rsf", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    # The diagonal is top-left: three of the alignments are wrong, and a window is not offered.
    assert "3 failed, 4 passed, 5 skipped" in done.stdout, done.stdout
    assert "likely cause: causal mask aligned top-left" in done.stdout
    assert "window" in done.stdout


def test_it_needs_numpy_alone():
    code = (
        "import sys; before = set(sys.modules); from regardant.conformance import cases; cases[0].calls();"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(name for name in new - sys.stdlib_module_names if 'cython' not in name))"  # NumPy's own
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['numpy', 'regardant']"
