#!/usr/bin/env bash
# A real Slurm cluster (two nodes by default) on one machine, inside its own namespaces.
#   SLURMTEST_DIR=/tmp/x cluster.sh start | stop | purge | status | exec CMD... | node-kill N | node-boot N
# Needs root with CAP_SYS_ADMIN (a rootless user namespace is not enough: slurmctld calls setgroups) and
#   apt-get install -y --no-install-recommends slurm-wlm munge iproute2 util-linux
# Everything lives under $SLURMTEST_DIR; nothing is added to the host's network, /etc or hostname.
# One pid+net+uts+mount namespace set holds munged, slurmctld and a bridge; each slurmd has its own
# net+uts+mount namespaces, so `hostname`, /etc/hosts and 127.0.0.1 are per node, as on real machines.
# stop kills the set's init (one pid): the kernel then kills every daemon, step and task in it.
# Client commands for the test-suite: PATH=$SLURMTEST_DIR/bin:$PATH (sbatch srun scancel squeue sinfo scontrol).
# shellcheck disable=SC2016 # what is in single quotes is for the inner shell
set -euo pipefail
die() { echo "cluster.sh: $*" >&2; exit 1; }
D=${SLURMTEST_DIR:-}; [ -n "$D" ] || die "set SLURMTEST_DIR"
case $D in /*) ;; *) die "SLURMTEST_DIR must be absolute" ;; esac
[ ${#D} -le 64 ] || die "SLURMTEST_DIR is ${#D} characters long, at most 64 (unix socket paths, 108 bytes)"
NODES=${SLURMTEST_NODES:-2} GPUS=${SLURMTEST_GPUS:-8}
CPUS=${SLURMTEST_CPUS:-64} MEM=${SLURMTEST_MEM_MB:-1000000} PART=${SLURMTEST_PARTITION:-gpu} NET=${SLURMTEST_NET:-10.77.0}
KILLWAIT=${SLURMTEST_KILLWAIT:-5} SDTIME=${SLURMTEST_SLURMD_TIMEOUT:-30}
TRACK=${SLURMTEST_PROCTRACK:-auto} # auto | cgroup | linuxproc
PATH=$PATH:/usr/sbin:/sbin
SELF=$(readlink -f "$0")
CLIENTS="sbatch srun salloc scancel squeue sinfo scontrol"

stat_field() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f"$2"; } # 1: state, 20: start time
alive() { # is the recorded init still that same process, and no zombie? sets P (pid), N (its pid namespace)
  P='' N=''; [ -s "$D/run/init" ] || return 1
  local t; read -r P t N <"$D/run/init"
  [ -n "$t" ] && [ -n "$N" ] && [ "$(stat_field "$P" 20)" = "$t" ] && [ "$(stat_field "$P" 1)" != Z ]
}
inns() { # run a command in the controller's namespaces, in the same directory
  alive || die "not running"
  exec nsenter -t "$P" -m -u -n -p --wd=. -- env SLURM_CONF="$D/slurm.conf" SLURMTEST_INSIDE=1 "$@"
}

# The v1 freezer hierarchy, mounted only in a private mount namespace, so that it does not matter where
# (or whether) the host mounts it: run a command with the hierarchy's root at $D/cg.
with_freezer() { unshare --mount sh -c 'mount -t cgroup -o freezer none "$0" && exec "$@"' "$D/cg" "$@"; }

write_files() {
  local i opt=''
  mkdir -p "$D"/{run,log,state,spool,gpu,bin,cg}; chmod 755 "$D" "$D/run"
  for ((i=1; i<=NODES; i++)); do mkdir -p "$D/spool/node$i"; done
  [ -s "$D/munge.key" ] || (umask 077; head -c 128 /dev/urandom >"$D/munge.key")
  [ "$GPUS" = 0 ] || opt=" Gres=gpu:$GPUS"
  { echo "127.0.0.1 localhost"; echo "$NET.254 ctl"
    for ((i=1; i<=NODES; i++)); do echo "$NET.$i node$i"; done; } >"$D/hosts"
  cat >"$D/slurm.conf" <<CONF
ClusterName=slurmtest
SlurmctldHost=ctl($NET.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it may start (+1 s): default 120, minimum 5
AuthInfo=socket=$D/run/munge.socket,cred_expire=5
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd.%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/$TRACK
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc=$D/log/jobcomp.log
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=$SDTIME
KillWait=$KILLWAIT
MinJobAge=3600
GresTypes=gpu
NodeName=node[1-$NODES] NodeAddr=$NET.[1-$NODES] CPUs=$CPUS RealMemory=$MEM$opt State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=$PART Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
  printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=%s\nCgroupAutomount=no\n' "$D/cg" >"$D/cgroup.conf"
  # The gpu plugin drops a gpu without File= (the node then goes INVAL, "count reported lower than
  # configured"), refuses File=/dev/null Count=8, and complains about regular files: links are clean.
  : >"$D/gres.conf"
  if [ "$GPUS" != 0 ]; then
    for ((i=0; i<GPUS; i++)); do ln -sfn /dev/null "$D/gpu/gpu$i"; done
    { echo "AutoDetect=off"
      echo "NodeName=node[1-$NODES] Name=gpu File=$D/gpu/gpu[0-$((GPUS - 1))]"; } >"$D/gres.conf"
  fi
  for i in $CLIENTS; do
    cat >"$D/bin/$i" <<CLI
#!/bin/sh
# outside: enter the cluster, then the real command; inside (a job, or exec): the real command
PATH=\$(printf %s "\$PATH" | tr : '\n' | grep -vxF '$D/bin' | paste -sd: -); export PATH
[ -z "\${SLURMTEST_INSIDE:-}" ] || exec $i "\$@"
SLURMTEST_DIR='$D' exec '$SELF' exec $i "\$@"
CLI
    chmod 755 "$D/bin/$i"
  done
}

ns_init() { # pid 1 of the cluster
  local i pids=() core=()
  export SLURM_CONF=$D/slurm.conf
  hostname ctl; mount --bind "$D/hosts" /etc/hosts
  if [ "$TRACK" = cgroup ]; then # in our cgroup namespace this shows only our subtree
    umount "$D/cg"; mkdir -p "$D/cg/freezer"; mount -t cgroup -o freezer none "$D/cg/freezer"
  fi
  ip link set lo up
  ip link add br0 type bridge; ip addr add "$NET.254/24" dev br0; ip link set br0 up
  rm -f "$D/run/munge.socket"*
  munged --foreground --num-threads=10 --key-file="$D/munge.key" --socket="$D/run/munge.socket" \
    --pid-file="$D/run/munged.pid" --log-file="$D/log/munged.log" --seed-file="$D/run/munge.seed" & pids+=($!)
  for ((i=0; i<100; i++)); do [ ! -S "$D/run/munge.socket" ] || break; sleep 0.05; done
  slurmctld -D -c & pids+=($!); core=("${pids[@]}")
  for ((i=1; i<=NODES; i++)); do boot_node "$i"; pids+=($!); done
  trap 'kill "${pids[@]}" 2>/dev/null; exit 0' TERM
  wait -n "${core[@]}" || true; exit 1 # munged or slurmctld died; bash reaps every orphan meanwhile
}

boot_node() { # in the controller's namespaces
  local p k
  setsid unshare --net --uts --mount bash "$SELF" __node "$1" >>"$D/log/init.log" 2>&1 </dev/null & p=$!
  echo "$p" >"$D/run/node$1.nspid" # as seen inside the pid namespace
  for ((k=0; k<200; k++)); do [ "$(readlink "/proc/$p/ns/net")" = "$(readlink /proc/self/ns/net)" ] || break; sleep 0.02; done
  ip link add "v$1" type veth peer name eth0 netns "$p"
  ip link set "v$1" master br0 up
}

ns_node() {
  local k
  hostname "node$1"
  for ((k=0; k<200; k++)); do ip link show eth0 >/dev/null 2>&1 && break; sleep 0.02; done
  ip link set lo up; ip addr add "$NET.$1/24" dev eth0; ip link set eth0 up
  export SLURMTEST_INSIDE=1
  exec slurmd -D -N "node$1"
}

kill_node() { # a power cut: the link goes first, then every process of the node
  local n f k; n=$(readlink "/proc/$(cat "$D/run/node$1.nspid")/ns/net") || die "node$1 is not up"
  ip link del "v$1"
  for ((k=0; k<3; k++)); do
    for f in /proc/[0-9]*; do [ "$(readlink "$f/ns/net" 2>/dev/null)" != "$n" ] || kill -9 "${f#/proc/}" 2>/dev/null || true; done
  done
  rm -rf "$D/spool/node$1"; mkdir -p "$D/spool/node$1"
}

start() {
  local c i p
  [ "$(id -u)" = 0 ] || die "needs root"
  ! alive || die "already running (init pid $P)"
  for c in munged slurmctld slurmd sbatch ip unshare nsenter; do command -v $c >/dev/null || die "$c not found"; done; c=''
  # cgroup is what production runs: USR1/TERM reach only the task (the launcher), KILL the whole step.
  # linuxproc signals every descendant and loses orphans: a weaker model, for where cgroups can't be used.
  mkdir -p "$D/cg"; rm -rf "$D/state" "$D/spool" "$D"/run/*
  if [ "$TRACK" = auto ]; then TRACK=linuxproc; ! with_freezer test -w "$D/cg/cgroup.procs" 2>/dev/null || TRACK=cgroup; fi
  write_files; export SLURMTEST_PROCTRACK=$TRACK; echo "$TRACK" >"$D/run/proctrack"
  local pre=':' opt='' # the shell becomes setsid, then unshare: its pid is unshare's, whose one child is init
  if [ "$TRACK" = cgroup ]; then
    echo "slurmtest.$$" >"$D/run/cgroup"; opt=--cgroup
    pre='mount -t cgroup -o freezer none "$D/cg" && mkdir "$D/cg/$CG" && echo $$ >"$D/cg/$CG/cgroup.procs"'
  fi
  D=$D CG=slurmtest.$$ OPT=$opt SELF=$SELF unshare --mount sh -ec "$pre"'
    echo $$ >"$D/run/unshare.pid"
    exec setsid unshare $OPT --pid --fork --kill-child --mount-proc --net --uts --mount bash "$SELF" __init
    ' >>"$D/log/init.log" 2>&1 </dev/null &
  for ((i=0; i<100; i++)); do
    p=$(cat "$D/run/unshare.pid" 2>/dev/null || true)
    [ -z "$p" ] || read -r c _ < <(cat "/proc/$p/task/$p/children" 2>/dev/null) || true
    [ -z "$c" ] || break; sleep 0.05
  done
  [ -n "$c" ] || { stop >/dev/null; die "no init; see $D/log/init.log"; }
  echo "$c $(stat_field "$c" 20) $(readlink "/proc/$c/ns/pid")" >"$D/run/init"
  for ((i=0; i<150; i++)); do
    if [ "$(timeout 5 "$SELF" exec sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "$NODES" ]; then
      echo "up: $NODES nodes, init pid $c, proctrack $TRACK; PATH=$D/bin:\$PATH"; return 0
    fi
    alive || { stop >/dev/null; die "init died; see $D/log"; }
    sleep 0.1
  done
  timeout 5 "$SELF" exec sinfo -N -l >&2 || true; stop >/dev/null; die "nodes not idle; see $D/log"
}

stop() {
  local i up=0
  if alive; then
    up=1; kill -TERM "$P"
    for ((i=0; i<50; i++)); do alive || break; sleep 0.1; done
    ! alive || kill -KILL "$P"
  fi
  if [ -n "$N" ]; then # nothing may be left in the cluster's pid namespace
    for ((i=0; i<100; i++)); do
      [ -n "$(find /proc -maxdepth 3 -path '/proc/[0-9]*/ns/pid' -lname "$N" 2>/dev/null)" ] || break; sleep 0.1
    done
    ((i < 100)) || die "processes left in $N"
  fi
  if [ -s "$D/run/cgroup" ]; then with_freezer find "$D/cg/$(cat "$D/run/cgroup")" -depth -type d -exec rmdir {} \; || true; fi
  rm -f "$D/run/init" "$D/run/cgroup"
  if [ $up = 1 ]; then echo "stopped"; else echo "not running"; fi
}

case ${1:-} in
  start) start ;;
  stop) stop ;;
  purge) stop; rm -rf "$D" ;;
  status) alive || { echo "not running"; exit 3; }; echo "init pid $P, proctrack $(cat "$D/run/proctrack")"
    "$SELF" exec sinfo -N -l; "$SELF" exec squeue ;;
  exec) shift; inns "$@" ;;
  node-kill|node-boot) [ -n "${2:-}" ] || die "which node number?"
    export SLURMTEST_PROCTRACK; SLURMTEST_PROCTRACK=$(cat "$D/run/proctrack" 2>/dev/null || true); inns bash "$SELF" "__$1" "$2" ;;
  __node-kill) kill_node "$2" ;;
  __node-boot) boot_node "$2" ;;
  __init) ns_init ;;
  __node) ns_node "$2" ;;
  *) die "usage: SLURMTEST_DIR=DIR $0 start|stop|purge|status|exec CMD...|node-kill N|node-boot N" ;;
esac
