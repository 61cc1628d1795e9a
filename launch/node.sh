#!/usr/bin/env bash
# One node's part of a run: what each Slurm task runs, and what a person runs by hand on every node at once.
#
#     NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node1 MASTER_PORT=29500 bash launch/node.sh CONFIG [--key value ...]
#
# Exit code: 0 done, 75 stopped on request and to be started again, 2 the user's mistake (a rerun cannot help), else the
# code of the rank that failed first. It takes from the environment:
#   NUM_NODES       nodes of the run (default: 1)
#   NODE_RANK       this node's number, from 0 (default: Slurm's, else 0)
#   MASTER_ADDR     name or address of node 0, and
#   MASTER_PORT     a port that is free on it; both are needed with more than one node
#   RANKS_PER_NODE  ranks on each node (default: a rank a GPU; on CPU, as many as the spread says)
#   SPREAD          how the run is spread: an accelerate file, or the name of one in configs/accelerate (default: FSDP1 on
#                   the GPUs, or on two CPU ranks where there is none)
set -euo pipefail

if [[ $# -eq 0 || $1 == -* ]]; then
    echo "usage: bash launch/train.sh CONFIG [--key value ...], or launch/node.sh on each of several nodes" >&2
    exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
config=$1
shift

nodes=${NUM_NODES:-1}
# Here and not in the batch script: there SLURM_NODEID is 0 whatever the node.
rank=${NODE_RANK:-${SLURM_NODEID:-0}}

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
if [[ -n ${SPREAD:-} ]]; then
    spread=$SPREAD
    [[ -f $spread ]] || spread=$spreads/$SPREAD.yaml
elif ((gpus == 0)); then
    spread=$spreads/fsdp1_cpu_2rank.yaml
else
    spread=$spreads/fsdp1_1node_8gpu.yaml
fi
if [[ ! -f $spread ]]; then
    echo "recipe: SPREAD '${SPREAD:-}' is no file, and $spread does not exist; there are:" \
        "$(cd "$spreads" && echo *.yaml)" >&2
    exit 2
fi

# What the spread says of numbers holds only for the machines it was written for.
said() {
    sed -n "s/^$1: *\([0-9]*\).*/\1/p" "$spread"
}

on_cpu=false
if grep -q '^use_cpu: *true' "$spread"; then on_cpu=true; fi
if [[ -n ${RANKS_PER_NODE:-} ]]; then
    ranks=$RANKS_PER_NODE
elif [[ $on_cpu == true || -n ${SPREAD:-} ]]; then
    ranks=$(($(said num_processes) / $(said num_machines)))
else
    ranks=$gpus
fi

launcher=(--config_file "$spread" --num_machines "$nodes" --num_processes $((nodes * ranks)) --machine_rank "$rank")
if ((nodes > 1)); then
    if [[ -z ${MASTER_ADDR:-} || -z ${MASTER_PORT:-} ]]; then
        echo "recipe: NUM_NODES is $nodes and MASTER_ADDR or MASTER_PORT is not set: every node needs node 0's name," \
            "and a port that is free on it" >&2
        exit 2
    fi
    # Until the last node has started: nodes whose file system is cold, or that pull a container, are minutes late.
    launcher+=(--main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" --rdzv_conf timeout=1800)
else
    # Port 0: the launcher takes a free one, so that two runs on one machine do not meet.
    launcher+=(--main_process_port 0)
fi

if [[ $on_cpu == true ]]; then
    # The ranks share the cores; without it each would start a thread on every core, and they would wait for each other.
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    threads=$((cores / ranks))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
else
    # Gathering and freeing a unit after the other leaves holes that the allocator cannot use without this.
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
    # Else torch compiles some small products on first use, which takes a C compiler and Python's headers on every node:
    # https://github.com/pytorch/pytorch/issues/196977
    export TORCH_DISABLE_NATIVE_JIT=${TORCH_DISABLE_NATIVE_JIT:-1}
fi
echo "recipe: node $rank of $nodes ($(uname -n)): $ranks ranks, $gpus GPUs, $(basename "$spread")" >&2

exec python -m recipe.launch "${launcher[@]}" -m recipe.train --config "$config" "$@"
