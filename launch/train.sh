#!/usr/bin/env bash
# Train on this machine, on as many ranks as it has GPUs, or on two CPU ranks where it has none:
#
#     bash launch/train.sh CONFIG [--key value ...]
#
# CONFIG is a run's YAML file; each --key overrides it. The same command again goes on from the newest checkpoint.
# It takes SPREAD and RANKS_PER_NODE from the environment (see node.sh).
set -euo pipefail
NUM_NODES=1 NODE_RANK=0 exec bash "$(dirname "${BASH_SOURCE[0]}")/node.sh" "$@"
