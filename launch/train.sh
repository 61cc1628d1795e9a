#!/usr/bin/env bash
# Train on this machine, on as many ranks as it has GPUs, or on two CPU ranks where it has none:
#
#     bash launch/train.sh CONFIG [--key value ...]
#
# CONFIG is a run's YAML file; each --key overrides it. The same command again goes on from the newest checkpoint.
# It takes from the environment:
#   SPREAD  how the run is spread: a file, or the name of one in configs/accelerate (default: by the GPUs)
set -euo pipefail

if [[ $# -eq 0 || $1 == -* ]]; then
    echo "usage: bash launch/train.sh CONFIG [--key value ...]" >&2
    exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
config=$1
shift

# GPUs that PyTorch will see. nvidia-smi does not know CUDA_VISIBLE_DEVICES, which may hide some of them.
count_gpus() {
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true
    else
        (nvidia-smi --list-gpus 2>/dev/null || true) | grep -c '^GPU ' || true
    fi
}

spreads=$ROOT/configs/accelerate
gpus=$(count_gpus)
ranks=""
if [[ -n ${SPREAD:-} ]]; then
    spread=$SPREAD
    [[ -f $spread ]] || spread=$spreads/$SPREAD.yaml
elif ((gpus == 0)); then
    spread=$spreads/fsdp1_cpu_2rank.yaml
else
    spread=$spreads/fsdp1_1node_8gpu.yaml
    ranks=$gpus
fi
if [[ ! -f $spread ]]; then
    echo "recipe: SPREAD '${SPREAD:-}' is no file, and $spread does not exist; there are:" \
        "$(cd "$spreads" && echo *.yaml)" >&2
    exit 2
fi

# Port 0: the launcher takes a free one, so that two runs on one machine do not meet.
launcher=(--config_file "$spread" --main_process_port 0)
if [[ -n $ranks ]]; then
    launcher+=(--num_processes "$ranks")
else
    ranks=$(sed -n 's/^num_processes: *\([0-9]*\).*/\1/p' "$spread")
fi

check=()
if grep -q '^use_cpu: *true' "$spread"; then
    check=(--cpu)
    # The ranks share the cores; without it each would start a thread on every core, and they would wait for each other.
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    threads=$((cores / ranks))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
    echo "recipe: $ranks CPU ranks, $OMP_NUM_THREADS thread(s) each ($(basename "$spread"), $gpus GPUs)" >&2
else
    # Gathering and freeing a unit after the other leaves holes that the allocator cannot use without this.
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
    echo "recipe: $ranks ranks ($(basename "$spread"), $gpus GPUs)" >&2
fi

# In one process first: a mistake is listed once, and without the launcher's traceback under it.
recipe check --world_size "$ranks" "${check[@]}" --config "$config" "$@"

exec accelerate launch "${launcher[@]}" -m recipe.train --config "$config" "$@"
