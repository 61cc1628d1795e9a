#!/usr/bin/env bash
# From a clone to a trained model in minutes, on a laptop without a GPU as on a machine with eight:
#
#     bash launch/quickstart.sh [DIR=runs/quickstart]
#
# A small Llama learns to write functions for docstrings, on real data. The run is stopped half-way and started again, to
# show that it goes on where it was; then its export is loaded with plain transformers and asked for a function.
set -euo pipefail
dir=${1:-}
[[ -z $dir || $dir == /* ]] || dir=$PWD/$dir
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"
dir=${dir:-runs/quickstart}
stop_at=30 # half of max_steps in configs/quickstart.yaml
began=$SECONDS

say() {
    printf '\n== %s\n' "$*"
}

train() {
    bash launch/train.sh configs/quickstart.yaml --model_name_or_path "$dir/model" --dataset_name "$dir/data.jsonl" \
        --data_cache_dir "$dir/prepared" --output_dir "$dir/run" "$@"
}

say "1/4 data and model"
recipe quickstart prepare "$dir"

say "2/4 train, and stop after step $stop_at"
# A new run each time: a finished one would have nothing to show. run.json says that the folder is a run's.
if [[ -e $dir/run && ! -f $dir/run/run.json ]]; then
    echo "recipe: $dir/run is not a run's folder; give another DIR" >&2
    exit 2
fi
rm -rf "$dir/run"
train --stop_at_step "$stop_at"

say "3/4 the same command again: resume, train to the end, export"
train

say "4/4 what came of it"
recipe quickstart report "$dir" --resumed-at "$stop_at"
echo "quickstart: ok, in $((SECONDS - began)) s"
