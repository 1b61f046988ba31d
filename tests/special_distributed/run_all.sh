#!/usr/bin/env bash
# Runs the programs of this folder one after the other, each on four ranks, until one fails; its exit code is this one's.
#   run_all.sh [PROGRAM ...]     all, or those named: run_all.sh test_tensor_dict
# DEADLINE_S: seconds that a program may take (180).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=tests/special_distributed
deadline_s=${DEADLINE_S:-180}
python=python
if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore::UserWarning}

programs=("$@")
if ((${#programs[@]} == 0)); then
    for file in "$folder"/test_*.py; do programs+=("$(basename "$file" .py)"); done
fi
for program in "${programs[@]}"; do
    if [[ ! -f $folder/$program.py ]]; then
        echo "error: $program: there is no $folder/$program.py" >&2
        exit 2
    fi
done

TMPDIR=$(mktemp -d)
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
began=$SECONDS
for program in "${programs[@]}"; do
    start=$SECONDS
    code=0
    timeout --foreground --kill-after=40 "$deadline_s" \
        "$python" -m torch.distributed.run --standalone --nproc-per-node 4 -m "tests.special_distributed.$program" ||
        code=$?
    if ((code)); then
        why="exit code $code"
        if ((code == 124 || code == 137)); then why="not done within $deadline_s s (DEADLINE_S)"; fi
        echo "FAILED $program after $((SECONDS - start)) s: $why" >&2
        exit "$code"
    fi
    echo "passed $program in $((SECONDS - start)) s"
done
echo "all ${#programs[@]} passed in $((SECONDS - began)) s"
