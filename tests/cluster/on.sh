#!/bin/bash
# on.sh DIR a|…|v COMMAND…: run a command on one of the hosts that hosts_up.sh made, in this working directory.
set -eu
folder=$1 host=$2
shift 2
export PATH="$folder/bin:$PATH"
# The command gets its own host name and mount table. Its /etc/hosts names all hosts; outside nothing changes.
exec nsenter --net="/run/netns/$(basename "$folder")-$host" unshare --uts --mount \
    sh -c 'mount --bind "$1/hosts" /etc/hosts; hostname "host-$2"; shift 2; exec "$@"' sh "$folder" "$host" "$@"
