#!/usr/bin/env bash
# Everything that has to hold before a change is kept: lint, types, shell scripts, the Dockerfile, and all tests. Arguments
# go to pytest:
#
#     bash launch/test.sh [-m 'not slow' ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"

shopt -s nullglob
ruff check .
mypy
shellcheck --external-sources --source-path=SCRIPTDIR launch/*.sh slurm/*.sh .ci/run
hadolint Dockerfile
exec python -m pytest "$@"
