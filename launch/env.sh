# The Python environment, made on first use and then reused. Sourced by the other scripts: `source launch/env.sh`.
#
# Sets ROOT (the repository) and puts the environment's programs first on PATH. It takes from the environment:
#   VENV    folder of the environment (default: .venv in the repository); a container or a cluster names one made before
#   PYTHON  the Python to make it with (default: the first of python3, python3.14 ... python3.11 that is 3.11 or newer)
# shellcheck shell=bash
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}

# The first Python that is new enough, on stdout.
find_python() {
    local python
    for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "recipe: no Python of version 3.11 or newer (tried ${PYTHON:-python3, python3.14 ... python3.11});" \
        "install one, or set PYTHON to its path" >&2
    return 1
}

# What should be installed, in a word: it changes when pyproject.toml or constraints.txt do.
wanted() {
    cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum
}

installed() {
    [[ -x $VENV/bin/python && -f $VENV/.installed && $(<"$VENV/.installed") == "$(wanted)" ]]
}

# Run a command and show what it printed only if it fails.
quietly() {
    local log=$VENV/.install.log
    if ! "$@" >"$log" 2>&1; then
        cat "$log" >&2
        echo "recipe: failed: $*" >&2
        return 1
    fi
}

install() {
    local python
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        echo "recipe: making $VENV with $("$python" --version)"
        quietly "$python" -m venv "$VENV"
    fi
    echo "recipe: installing into $VENV (PyTorch and its kin: minutes the first time)"
    # The constraints also keep pip from the newest PyTorch that the ranges of the other packages admit.
    quietly "$VENV/bin/python" -m pip install -c "$ROOT/constraints.txt" -e "${ROOT}[dev]"
    wanted >"$VENV/.installed"
}

if ! installed; then
    if [[ -d $VENV && ! -w $VENV ]]; then
        echo "recipe: $VENV cannot be written to and was made for another pyproject.toml or constraints.txt; make it" \
            "(or its image) anew, or set VENV to a folder of yours" >&2
        exit 2
    fi
    mkdir -p "$VENV"
    # Two scripts that start at once on a new clone would install into one folder. (macOS has no flock.)
    exec 9>"$VENV/.lock"
    if command -v flock >/dev/null; then flock 9; fi
    installed || install
    exec 9>&-
fi
export PATH="$VENV/bin:$PATH"
