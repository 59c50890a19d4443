#!/bin/bash
# One group of an elastic run, launched again when it is lost. Start this once for each group, on the host where the group's launch
# belongs. The words are the launch, by whatever launcher. SDP_ELASTIC_COORDINATOR is an address that all hosts reach:
#
#   export SDP_ELASTIC_TOKEN_FILE=$PWD/token SDP_ELASTIC_COORDINATOR=10.0.0.1:29400
#   sdp coordinate run.json --bind 10.0.0.1:29400 --ranks 8 --dump-dir runs/mine &
#   SDP_ELASTIC_GROUP=0 elastic.sh sdp train run.json --dump-dir runs/mine                    # all ranks on this host
#   SDP_ELASTIC_GROUP=1 elastic.sh torchrun --nproc-per-node 8 -m sdp train run.json --dump-dir runs/mine
#   SDP_ELASTIC_GROUP=2 elastic.sh sdp launch --launcher mpirun --hostfile hosts-2 run.json --dump-dir runs/mine
#   SDP_ELASTIC_GROUP=3 elastic.sh sdp launch --launcher deepspeed --hostfile hosts-3 run.json --dump-dir runs/mine
#
# A launch that fails is repeated after 1, 2, 4 … 60 s, at most RESTARTS times (default: 20). After a launch of ten minutes or
# more, the count starts again.
set -u
: "${SDP_ELASTIC_GROUP:?the number of the group, from 0}" "${SDP_ELASTIC_COORDINATOR:?HOST:PORT of sdp coordinate}"
: "${SDP_ELASTIC_TOKEN_FILE:?a file with the shared token}"
said() { echo "elastic.sh: group $SDP_ELASTIC_GROUP: $*" >&2; }

told=
launch=
# A signal to this script is passed on once, and the group is not launched again. The other groups go on.
stop() { told=$1; [ -z "$launch" ] || kill -s "$1" "$launch" 2> /dev/null; }
trap 'stop TERM' TERM
trap 'stop INT' INT
trap 'stop USR1' USR1

count=0
while true; do
    began=$SECONDS
    "$@" &
    launch=$!
    [ -z "$told" ] || kill -s "$told" "$launch" 2> /dev/null  # the signal came before the line above
    while wait "$launch"; code=$?; kill -0 "$launch" 2> /dev/null; do :; done  # a trap interrupts wait
    launch=
    case $code in
    0) exit 0 ;;                      # the run is over
    2) exit 2 ;;                      # a mistake, which would be made again
    129 | 130 | 138 | 143) exit "$code" ;;  # somebody has told the ranks to stop
    esac
    [ -z "$told" ] || exit "$code"
    [ $((SECONDS - began)) -lt 600 ] || count=0
    count=$((count + 1))
    if [ "$count" -gt "${RESTARTS:-20}" ]; then said "lost, and not launched again ($((count - 1)) times, RESTARTS)"; exit "$code"; fi
    pause=$((count < 7 ? 1 << (count - 1) : 60))
    said "ended with exit code $code; launch $count of ${RESTARTS:-20} more in $pause s"
    sleep "$pause" &
    launch=$!
    wait "$launch"
    launch=
    [ -z "$told" ] || exit "$code"
done
