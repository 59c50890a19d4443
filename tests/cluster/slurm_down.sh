#!/bin/bash
# slurm_down.sh DIR: end the jobs and daemons that slurm_up.sh started, by their ids.
folder=$1/slurm
export SLURM_CONF="$folder/slurm.conf"
"$(dirname "$0")/on.sh" "$1" a scancel --user root 2> /dev/null
for daemon in slurmd-host-{a,b,c,d,q,r} slurmctld slurmdbd mariadb munge; do
    [ ! -f "$folder/$daemon.pid" ] || kill "$(cat "$folder/$daemon.pid")"
done
true
