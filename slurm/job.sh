# The body of a batch job, sourced by the scripts beside it: one task a node, each runs launch/node.sh. It takes
#   project  the project's folder
#   config   the configuration where the command line gives none
#
# A request to stop (the time limit nears, or `scancel --batch --signal=USR1 JOB`) arrives here as SIGUSR1. Under
# proctrack/cgroup, what clusters run, a signal to the tasks reaches their launchers alone, so this script writes the
# request into a file that every rank polls. The ranks save at the next step and leave with exit code 75; the job is then
# requeued and goes on from that checkpoint. Nothing else is requeued by this script: a bad config fails the same way
# again, and a crash wants to be looked at. (Slurm itself requeues a job whose node died.)
# shellcheck shell=bash
set -euo pipefail

stop_code=75  # recipe/stopping.py
leave_code=143
job=${SLURM_JOB_NAME//[^A-Za-z0-9._-]/_}-$SLURM_JOB_ID
start=${SLURM_RESTART_COUNT:-0}

say() {
    printf '%s %s: %s\n' "$(date '+%F %T')" "$job" "$*"
}

cd "${project:?sourced by the scripts beside it}"
logs=$project/logs/$job
mkdir -p "$logs"
# Of this start alone: a request that an earlier start obeyed must not stop this one. It exists from the beginning, since
# a network file system may hide a new file for a minute, but not what is in an old one.
export STOP_FILES=$logs/stop.$start
: >"$STOP_FILES"
export REPORTS=$logs/ended.$start
rm -rf "$REPORTS"

# shellcheck disable=SC2329 # the traps call it
stop() {
    say "$1: asked the ranks to $2"
    echo "$1" >>"$STOP_FILES"
}
# First of all: a signal that comes before its trap would end this script. (With a time limit of less than --signal asks
# for, Slurm sends it at once.)
trap 'stop SIGUSR1 "save and come back"' USR1
# From scancel, or at the end of a pre-emption's grace.
trap 'stop SIGTERM "save and leave"' TERM

# Left over in the shell that submitted, they would mean something else here. A site may set them.
unset NODE_RANK RANKS_PER_NODE MASTER_ADDR MASTER_PORT
# Arrays that a site may fill; see site.env.example.
SRUN_ARGS=()
IN_CONTAINER=()
if [[ -f slurm/site.env ]]; then
    set +eu # modules and conda are not written for them
    # shellcheck source=site.env.example
    source slurm/site.env
    set -eu
fi

if [[ $# -gt 0 && $1 != -* ]]; then
    config=$1
    shift
fi

# -- where the ranks meet ---------------------------------------------------------------------------------------------

export NUM_NODES=$SLURM_JOB_NUM_NODES
if ! command -v scontrol >/dev/null; then
    say "no scontrol on PATH, which names the first node; load Slurm's module in slurm/site.env" >&2
    exit 2
fi
# By name, never localhost: the other nodes have to reach it.
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=${MASTER_ADDR:-$first_node}
# Two jobs on one node have different ids. Below 32768, where Linux begins to hand ports out by itself.
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
# From what Slurm gave (--gpus-per-node), so that it is written once.
export RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:?ask for GPUs (--gpus-per-node), or set RANKS_PER_NODE}}

# -- environment of the ranks; site.env may have set each ---------------------------------------------------------------

# Compute nodes often have no network, and 16 ranks that ask the hub at once are turned away where they have one.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
# Python would hold lines back while it writes to a file, and the last ones are what a post-mortem is about.
export PYTHONUNBUFFERED=1
# Only what goes wrong; INFO is for the first job on a new cluster (it names the network that NCCL took).
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# A node's cores are shared by its ranks, whose tokenizing and checkpoint writing use threads.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    # Since Slurm 22.05 srun does not take it from sbatch, and would bind all ranks of a node to one core.
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    threads=$((SLURM_CPUS_PER_TASK / RANKS_PER_NODE))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
fi

# -- run ----------------------------------------------------------------------------------------------------------------

say "start $start: $NUM_NODES nodes ($SLURM_JOB_NODELIST) x $RANKS_PER_NODE ranks, $config; nodes' logs: $logs"
# In the background, so that a signal is heard while it runs. A node that fails takes the others with it: they would wait
# for it until their collectives time out.
srun --export=ALL --nodes="$NUM_NODES" --ntasks="$NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    --output="$logs/node%n.log" --open-mode=append "${SRUN_ARGS[@]}" \
    "${IN_CONTAINER[@]}" bash launch/node.sh "$config" "$@" &
task=$!
# A trap ends `wait` before srun has ended; asked again, it gives srun's code.
while wait "$task" || true; kill -0 "$task" 2>/dev/null; do :; done
code=0
wait "$task" || code=$?

# srun's code is the highest of all tasks, which may be that of a task that it ended itself. The ranks' reports are named so
# that what came first comes first.
reports=("$REPORTS"/*-code*.txt)
first=${reports[0]}
if ((code != 0)) && [[ -f $first ]]; then
    code=${first##*-code}
    code=${code%.txt}
fi

# Whether Slurm is pre-empting this job: then its tasks alone have had SIGTERM, and left before the grace time was over, which
# is a job that ended by itself in Slurm's eyes.
preempted() {
    local about
    about=$(scontrol show job "$SLURM_JOB_ID")
    [[ $about == *JobState=RUNNING* && $about =~ PreemptTime=[0-9] ]]
}

# Whether start number $1 stopped before its first step (recipe/stopping.py's words).
trained_nothing() {
    grep -qs "nothing was trained in this start" "$logs/ended.$1"/*-code"$stop_code".txt
}

if ((code == 0)); then
    say "done"
elif ((code == stop_code)) && trained_nothing "$start" && trained_nothing $((start - 1)); then
    say "two starts in a row were stopped before their first step, a third would be too; not requeued. Give a longer" \
        "--time, or a shorter --signal=B:USR1@SECONDS"
elif ((code == stop_code)) || { ((code == leave_code)) && preempted; }; then
    say "stopped as asked; requeued. $(cat "$first" 2>/dev/null || true)"
    scontrol requeue "$SLURM_JOB_ID" || say "could not be requeued (--no-requeue?): sbatch it again, it goes on" >&2
else
    say "failed with exit code $code"
    if [[ -f $first ]]; then
        cat "$first"
        for report in "${reports[@]:1}"; do
            cmp -s "$first" "$report" || printf '%s ... %s\n' "$(head -n 1 "$report")" "$(tail -n 1 "$report")"
        done
    fi
    say "more in $logs"
fi
exit "$code"
