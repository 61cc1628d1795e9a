#!/usr/bin/env bash
# Fine-tune Llama-2-70B on one node of 8 GPUs (bf16 weights and paged moments; see the config):
#
#     sbatch slurm/llama70b_1node.sh [CONFIG] [--key value ...]
#
# From the project's folder. What follows may all be given to sbatch instead, which wins.
#
# EDIT for your site, or give sbatch: remove one # of what it wants; --cpus-per-task is a node's cores.
##SBATCH --account=ACCOUNT
##SBATCH --partition=gpu
##SBATCH --constraint=a100-80gb
#SBATCH --job-name=llama70b
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# See llama70b_2node.sh. One node writes and reads its checkpoints (690 GB) with half the network.
#SBATCH --signal=B:USR1@1800
set -euo pipefail
config=configs/llama2_70b_1node.yaml
project=${SLURM_SUBMIT_DIR:?run me with sbatch}
if [[ ! -f $project/slurm/job.sh ]]; then
    echo "recipe: submitted from $project, which is not the project's folder; cd there and sbatch again" >&2
    exit 2
fi
source "$project/slurm/job.sh"
