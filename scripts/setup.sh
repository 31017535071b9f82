#!/usr/bin/env bash
# Make .venv with everything the notebooks and the tests need; a second run finds nothing to do.
#   PYTHON=python3.12 bash scripts/setup.sh      another interpreter, 3.11.5 or newer
#   TORCH_SPEC="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" bash scripts/setup.sh      another build of torch
#   bash scripts/setup.sh --no-export            leave sparseattn/*.py as they are
#   bash scripts/setup.sh --python               only look whether the interpreter is new enough
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11, 5))' 2>/dev/null; then # what constraints.txt needs
    found=$("$python" -c 'import sys; print("Python " + sys.version.split()[0])' 2>/dev/null || echo "not there")
    echo "set-up: expected Python 3.11.5 or newer, but $python is $found; PYTHON=python3.12 bash scripts/setup.sh takes another" >&2
    exit 1
fi
if [[ ${1:-} == --python ]]; then exit 0; fi
if [[ -x .venv/bin/python && -n ${TORCH_SPEC:-}${PYTHON:-} ]]; then
    echo "set-up: .venv stays as it is, with its Python and torch; delete it, so that PYTHON and TORCH_SPEC count" >&2
fi

stamp=.venv/.sparseattn
want=$("$python" -c 'import hashlib, sys
print(hashlib.sha256(b"".join(open(f, "rb").read() for f in sys.argv[1:])).hexdigest())' \
    constraints.txt settings.ini setup.py pyproject.toml)
if [[ -f $stamp && $(cat "$stamp") == "$want" ]]; then exit 0; fi

rm -f "$stamp"
has_torch=$("$python" -c 'import torch; print(tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11))' 2>/dev/null || true)
if [[ ! -x .venv/bin/python ]]; then
    echo "set-up: making .venv"
    # A torch that is there already (a GPU build, say) is used as it is.
    if [[ -z ${TORCH_SPEC:-} && $has_torch == True ]]; then "$python" -m venv --system-site-packages .venv; else "$python" -m venv .venv; fi
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check -qq "$@"; }

if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    echo "set-up: installing ${TORCH_SPEC:=$(grep '^torch==' constraints.txt)} (minutes)"
    # shellcheck disable=SC2086  # words on purpose
    pip install $TORCH_SPEC
fi
constraints=$(mktemp)
trap 'rm -f "$constraints" "$constraints.all"' EXIT
grep -v '^torch==' constraints.txt >"$constraints" # torch is chosen above
if .venv/bin/python -c 'import triton' 2>/dev/null; then sed -i.all '/^triton==/d' "$constraints"; fi # a build for CUDA brings its own
echo "set-up: installing sparseattn and its notebooks, mol, dev, gpu extras (minutes)"
pip install -c "$constraints" -e '.[notebooks,mol,dev,gpu]'
hep=$(sed -n 's/^hep_requirements *= *//p' settings.ini)
# shellcheck disable=SC2086
if ! said=$(pip install -c "$constraints" --only-binary=:all: $hep 2>&1); then
    echo "set-up: $hep could not be installed (${said##*$'\n'}); notebooks use the events in the repository instead" >&2
fi
if [[ ${1:-} != --no-export ]]; then .venv/bin/nbdev-export; fi
echo "$want" >"$stamp"
echo "set-up: done"
