#!/bin/bash
# Starts SLURM on the hosts that hosts_up.sh DIR made: munge, a controller on host-a, and slurmd on host-a
# to host-d. All files are in DIR/slurm. slurm_down.sh DIR ends it.
# - Partition main has host-a and host-b. Partition urgent has the same hosts; its jobs put those of main
#   back into the queue. Partition side has host-c and host-d.
# - If slurmdbd and mariadb are installed, there is accounting, which sacct reads.
# - With cgroups (version 1), the kernel limits the memory of a job. Otherwise SLURM samples it.
# Commands need only SLURM_CONF=DIR/slurm/slurm.conf. Needs root, slurm-wlm and munge.
set -eu
folder=$1/slurm
on() { "$(dirname "$0")/on.sh" "$@"; }
mkdir -p "$folder/state" "$folder/munge"
chmod 700 "$folder/munge"
head -c 1024 /dev/urandom > "$folder/munge/key"
chmod 400 "$folder/munge/key"
export SLURM_CONF="$folder/slurm.conf"
munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" --pid-file="$folder/munge.pid" \
    --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"

accounting=accounting_storage/none
if command -v slurmdbd mariadbd mariadb-install-db > /dev/null; then
    accounting=accounting_storage/slurmdbd
    mariadb-install-db --no-defaults --user=root --datadir="$folder/database" --skip-test-db --auth-root-authentication-method=normal \
        > "$folder/mariadb.log" 2>&1
    on "$1" a mariadbd --no-defaults --user=root --datadir="$folder/database" --socket="$folder/mariadb.socket" \
        --pid-file="$folder/mariadb.pid" --bind-address=127.0.0.1 --innodb-buffer-pool-size=32M --innodb-lock-wait-timeout=900 \
        >> "$folder/mariadb.log" 2>&1 &
    cat > "$folder/slurmdbd.conf" <<CONFIG
DbdHost=host-a
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=root
PidFile=$folder/slurmdbd.pid
LogFile=$folder/slurmdbd.log
CONFIG
    chmod 600 "$folder/slurmdbd.conf"
    for _ in $(seq 100); do
        ! on "$1" a mariadb-admin --no-defaults --socket="$folder/mariadb.socket" ping > /dev/null 2>&1 || break
        sleep 0.1
    done
    on "$1" a slurmdbd
fi
limits=$'TaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/linux\nJobAcctGatherFrequency=task=1\nJobAcctGatherParams=OverMemoryKill'
if [ -w /sys/fs/cgroup/memory ]; then
    limits=$'TaskPlugin=task/cgroup\nJobAcctGatherType=jobacct_gather/none'
    printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\nConstrainSwapSpace=yes\nAllowedSwapSpace=0\n' \
        > "$folder/cgroup.conf"
fi
cat > "$folder/slurm.conf" <<CONFIG
ClusterName=sdp
SlurmctldHost=host-a(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its old credentials expire; by default 120 seconds.
AuthInfo=socket=$folder/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
# How long SLURM waits for a silent node; by default 300 seconds.
SlurmdTimeout=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=$accounting
AccountingStorageHost=host-a
AccountingStoragePass=$folder/munge/socket
JobCompType=jobcomp/none
$limits
PropagateResourceLimits=NONE
NodeName=host-a NodeAddr=10.77.0.1 CPUs=4 RealMemory=8000
NodeName=host-b NodeAddr=10.77.0.2 CPUs=4 RealMemory=8000
NodeName=host-c NodeAddr=10.77.0.3 CPUs=8 RealMemory=16000
NodeName=host-d NodeAddr=10.77.0.4 CPUs=8 RealMemory=16000
PartitionName=main Nodes=host-a,host-b Default=YES PriorityTier=1 DefMemPerNode=2000 State=UP
PartitionName=urgent Nodes=host-a,host-b PriorityTier=2 DefMemPerNode=2000 State=UP
PartitionName=side Nodes=host-c,host-d DefMemPerNode=2000 State=UP
CONFIG
[ "$accounting" = accounting_storage/none ] || for _ in $(seq 100); do
    ! timeout 5 "$(dirname "$0")/on.sh" "$1" a sacctmgr --immediate --quiet add cluster sdp > /dev/null 2>&1 || break
    sleep 0.1
done
on "$1" a slurmctld -c
for host in a b c d; do
    mkdir -p "$folder/spool-host-$host"
    on "$1" "$host" slurmd -N "host-$host"
done
for _ in $(seq 300); do
    [ "$(timeout 5 "$(dirname "$0")/on.sh" "$1" a sinfo --noheader --Node --states idle --format %N 2> /dev/null | sort -u | wc -l)" != 4 ] || exit 0
    sleep 0.1
done
echo "the nodes do not become idle; the end of $folder/slurmctld.log: $(tail -n 3 "$folder/slurmctld.log")" >&2
exit 1
