#!/usr/bin/env bash
# Fine-tune Llama-2-70B on two nodes of 8 GPUs, or on any number:
#
#     sbatch slurm/llama70b_2node.sh [CONFIG] [--key value ...]
#     sbatch --nodes=4 slurm/llama70b_2node.sh configs/llama2_70b.yaml --per_device_train_batch_size 1
#
# From the project's folder. What follows may all be given to sbatch instead, which wins.
#
# EDIT for your site, or give sbatch: remove one # of what it wants; --cpus-per-task is a node's cores.
##SBATCH --account=ACCOUNT
##SBATCH --partition=gpu
##SBATCH --constraint=a100-80gb
#SBATCH --job-name=llama70b
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# A request to stop this many seconds before the time limit: a step, a save, and two minutes (Slurm looks every 30 s, and may
# be a minute early or late). At 70B on 16 GPUs a step is under a minute, and a checkpoint 840 GB, written and read back for its
# checksums: 14 minutes at 2 GB/s. Every save logs how long it took: sbatch --signal=B:USR1@SECONDS.
#SBATCH --signal=B:USR1@1200
set -euo pipefail
config=configs/llama2_70b.yaml
project=${SLURM_SUBMIT_DIR:?run me with sbatch}
if [[ ! -f $project/slurm/job.sh ]]; then
    echo "recipe: submitted from $project, which is not the project's folder; cd there and sbatch again" >&2
    exit 2
fi
source "$project/slurm/job.sh"
