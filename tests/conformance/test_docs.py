"""docs/checking.md: the adapter that it shows is one, and is as short as it says.

docs/conformance.md: it has every case that there is, and every target, and what it says of failures can be repeated.
"""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from regardant.conformance import NotOffered, cases, select
from regardant.conformance.target import BUILT_IN, as_target

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "checking.md").read_text(encoding="utf-8")
FOUND = (DOCS / "conformance.md").read_text(encoding="utf-8")


@pytest.fixture
def mine(monkeypatch):
    """The adapter of the page, over a library that stands for anyone's."""

    def flash(q, k, v, *, is_causal, softmax_scale):
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        made = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=softmax_scale, enable_gqa=True
        )
        return made.transpose(1, 2)

    monkeypatch.setitem(sys.modules, "my_library", types.SimpleNamespace(flash=flash))
    shown = next(
        block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "my_library" in block
    )
    body = shown[shown.index("def mine") :].strip().splitlines()
    assert len(body) <= 10
    names = {}
    exec(compile(shown, "checking.md", "exec"), names)  # noqa: S102
    return names["mine"]


def test_the_adapter_of_the_page_is_one(mine):
    assert as_target(mine).keywords == {"causal", "scale", "dout"}
    for case in select(
        "alignment/square,heads/grouped,scale/given,gradients/plain,gradients/grouped-heads,widths/D7"
    ):
        case.check(mine)
    with pytest.raises(NotOffered, match="window"):
        select("window/width")[0].check(mine)


def test_the_page_names_every_built_in_option():
    for option in ("offset", "starts", "segments", "sinks", "return_lse", "dlse", "bias_gradient", "threads"):
        assert f"`{option}`" in TEXT


def rows():
    """The table of every case: its name, and a sign for each target."""
    table = FOUND[FOUND.index("## Every case") :]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return lines[0][1:], {name: signs for name, *signs in lines[2:]}


def test_the_page_of_findings_has_the_cases_that_there_are():
    targets, signs = rows()
    assert list(signs) == [case.name for case in cases]
    assert {"regardant", "regardant.torch", "torch", "onnxruntime", "jax"} <= set(targets) <= set(BUILT_IN)
    assert {"transformers:eager", "transformers:sdpa", "flex"} <= set(targets)


def test_regardant_passes_all_on_the_page_of_findings():
    targets, signs = rows()
    for target in ("regardant", "regardant.torch"):
        for name, found in signs.items():
            sign = found[targets.index(target)]
            assert sign == "✓" or (select(name)[0].views and sign == "–"), (target, name)


def test_every_failure_on_the_page_has_its_command():
    targets, signs = rows()
    for name, found in signs.items():
        for target, sign in zip(targets, found, strict=True):
            command = f"`regardant check {target} --cases {name}`"
            assert (command in FOUND) == sign.startswith("✗"), command
