#!/usr/bin/env bash
# Run the tests of the package and of the collection; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --no-export # modules are tested as they are committed
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" # the collection beside everything else
