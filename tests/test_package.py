"""What importing the package brings in, and what it offers."""

import subprocess
import sys

import regardant as rg


def test_the_op_needs_numpy_alone():
    code = (
        "import sys; before = set(sys.modules); import regardant; regardant.attention, regardant.KVCache;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['numpy', 'regardant']"


def test_every_public_name_is_there_and_described():
    for name in rg.__all__:
        assert getattr(rg, name).__doc__, name
