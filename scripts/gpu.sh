#!/usr/bin/env bash
# The first three quarters of an hour on a GPU, in parts of at most nine minutes, the most valuable first; Jupyter is not needed.
#
#   bash scripts/gpu.sh PART [SCALE]        PART: 1 to 5; SCALE: gpu, or smoke to try it
#
#   1  cost tables of HEPT and SBM-Transformer
#   2  cost tables of Sampled Transformer, PAT and SAMSA
#   3  trainings for eight minutes: the first rows of all studies; again, and it goes on
#   4  pages that have cost tables beside trainings, and show what part 3 trained: HEPT, SBM-Transformer, PAT
#   5  the same of SAMSA
#
# What it makes lies in build/SCALE (publish it with workflow/publish.py) and figures/*/runs/SCALE. Where OUT names a folder
# it is packed there as well. Pages of parts 4 and 5 replace those of smaller scales: publish one when its study has records.
set -uo pipefail
cd "$(dirname "$0")/.."
scale=${2:-gpu} python=.venv/bin/python status=0
[[ -x $python ]] || python=python3
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1

tables() {
    for notebook in "$@"; do
        timeout $((540 / $#)) $python workflow/execute.py "$notebook" --scale "$scale" --plain --threads "$(nproc)" || status=1
    done
}

case ${1:-} in
    1) tables hept/32_attention sbm/40_fastrg sbm/41_attention ;;
    2) tables sampled/51_attention pat/60_layers samsa/71_attention ;;
    3) timeout 540 $python -m sparseattn.studies all --scale "$scale" --budget 8 || status=$? ;;
    4) tables hept/34_tracking sbm/45_lra pat/62_shapes ;;
    5) tables samsa/73_lra samsa/74_peptides samsa/75_shapes ;;
    *) sed -n 2,13p "$0"; exit 2 ;;
esac
if [[ -n ${OUT:-} ]]; then
    found=()
    for folder in "build/$scale/figures" "build/$scale/executed" figures/*/runs/"$scale"; do
        if [[ -d $folder ]]; then found+=("$folder"); fi
    done
    tar -czf "$OUT/part$1.tgz" "${found[@]}" || status=1
fi
exit $status
