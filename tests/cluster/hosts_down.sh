#!/bin/bash
# hosts_down.sh DIR: end what runs on the hosts that hosts_up.sh made, and remove them. DIR stays.
name=$(basename "$1")
for host in a b c d e f g h i j k l m n o p q r s t u v switch; do
    ip netns pids "$name-$host" 2> /dev/null | xargs -r kill -9
    ip netns del "$name-$host" 2> /dev/null
done
true
