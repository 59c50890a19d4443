#!/bin/bash
# A SLURM of its own on the hosts that hosts_up.sh DIR made: munge, a controller on host-a and slurmd on host-a and host-b, all in
# DIR/slurm; slurm_down.sh DIR ends it. Partition main, and urgent, whose jobs put those of main back into the queue.
# SLURM_CONF=DIR/slurm/slurm.conf is all that its commands need. Needs root, slurm-wlm, munge.
set -eu
folder=$1/slurm
on() { "$(dirname "$0")/on.sh" "$@"; }
mkdir -p "$folder/state" "$folder/munge"
chmod 700 "$folder/munge"
head -c 1024 /dev/urandom > "$folder/munge/key"
chmod 400 "$folder/munge/key"
cat > "$folder/slurm.conf" <<CONFIG
ClusterName=sdp
SlurmctldHost=host-a(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# What a requeued job waits for is that its old credentials expire; 120 seconds unless told.
AuthInfo=socket=$folder/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Seconds from the signal that ends a job to its being killed: for a checkpoint, or for the end of a test.
KillWait=10
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
# No cgroups: the memory of a job is sampled.
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
PropagateResourceLimits=NONE
NodeName=host-a NodeAddr=10.77.0.1 CPUs=4 RealMemory=8000
NodeName=host-b NodeAddr=10.77.0.2 CPUs=4 RealMemory=8000
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 DefMemPerNode=2000 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 DefMemPerNode=2000 State=UP
CONFIG
munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" --pid-file="$folder/munge.pid" \
    --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"
export SLURM_CONF="$folder/slurm.conf"
on "$1" a slurmctld -c
for host in a b; do
    mkdir -p "$folder/spool-host-$host"
    on "$1" "$host" slurmd -N "host-$host"
done
for _ in $(seq 300); do
    [ "$(on "$1" a sinfo --noheader --partition main --states idle --format %D 2> /dev/null)" != 2 ] || exit 0
    sleep 0.1
done
echo "the nodes do not become idle; the end of $folder/slurmctld.log: $(tail -n 3 "$folder/slurmctld.log")" >&2
exit 1
