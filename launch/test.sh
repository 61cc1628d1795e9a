#!/usr/bin/env bash
# Everything that has to hold before a change is kept: lint, types, shell scripts, the Dockerfile, and all tests. Arguments
# go to pytest:
#
#     bash launch/test.sh [-m 'not slow' ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"

# tests/cluster starts a Slurm of its own. Where its packages may be installed they are; elsewhere those tests skip, and say
# what they miss.
if ! command -v /usr/sbin/slurmctld >/dev/null && [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "recipe: installing slurm-wlm and munge for tests/cluster"
    export DEBIAN_FRONTEND=noninteractive
    quietly apt-get update && quietly apt-get install -y --no-install-recommends slurm-wlm munge iproute2 util-linux ||
        echo "recipe: no Slurm, so tests/cluster is skipped, or fails where CI is set" >&2
fi

shopt -s nullglob
ruff check .
mypy
shellcheck --external-sources --source-path=SCRIPTDIR launch/*.sh slurm/*.sh tests/cluster/cluster.sh .ci/run
hadolint Dockerfile
exec python -m pytest "$@"
