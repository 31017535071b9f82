#!/usr/bin/env bash
# Re-execute the notebooks and write build/<scale>/index.html:
#   bash scripts/reproduce.sh [--scale smoke|cpu|gpu|paper] [--only CHAPTER] [--budget MINUTES] [--retrain] [--dry-run] [--cores N]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --python
for option in "$@"; do # --help and wrong arguments need no set-up
    if [[ $option == -h || $option == --help ]]; then exec "${PYTHON:-python3}" workflow/reproduce.py --help; fi
done
"${PYTHON:-python3}" workflow/reproduce.py --check "$@"
bash scripts/setup.sh
exec .venv/bin/python workflow/reproduce.py "$@"
