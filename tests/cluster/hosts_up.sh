#!/bin/bash
# Makes 12 hosts on one machine. They are network namespaces on a virtual switch (eth0 in each).
# Each has a host name and an sshd of its own.
# - hosts_up.sh DIR makes them, with keys and settings in DIR.
# - on.sh DIR a|…|l COMMAND… runs a command on one of them.
# - hosts_down.sh DIR removes them.
# Names of namespaces begin with the last part of DIR, so several sets can exist at the same time.
# Needs root, iproute2 and openssh.
set -eu
folder=$1 name=$(basename "$1")
mkdir -p "$folder/bin" /run/sshd
ssh-keygen -q -t ed25519 -N '' -f "$folder/key"
ssh-keygen -q -t ed25519 -N '' -f "$folder/hostkey"
echo '127.0.0.1 localhost' > "$folder/hosts"

# pdsh and mpirun find this ssh on the PATH that on.sh sets. It ignores the user's own settings.
cat > "$folder/ssh_config" <<CONFIG
Host *
  User root
  IdentityFile $folder/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
CONFIG
printf '#!/bin/sh\nexec /usr/bin/ssh -F %s/ssh_config "$@"\n' "$folder" > "$folder/bin/ssh"
chmod +x "$folder/bin/ssh"

ip netns add "$name-switch"
ip -n "$name-switch" link add switch type bridge
ip -n "$name-switch" link set switch up
address=1
for host in a b c d e f g h i j k l; do
    echo "10.77.0.$address host-$host" >> "$folder/hosts"
    ip netns add "$name-$host"
    ip link add eth0 netns "$name-$host" type veth peer name "$host" netns "$name-switch"
    ip -n "$name-switch" link set dev "$host" master switch up
    ip -n "$name-$host" addr add "10.77.0.$address/24" dev eth0
    ip -n "$name-$host" link set eth0 up
    ip -n "$name-$host" link set lo up
    case $host in
    # Slow links on the hosts of disturbed runs: steps take long but need little of the shared processor.
    b | e | f | g | h | i) tc -n "$name-$host" qdisc add dev eth0 root tbf rate 3mbit burst 64kb latency 5s ;;
    esac
    cat > "$folder/sshd-$host" <<CONFIG
ListenAddress 10.77.0.$address
HostKey $folder/hostkey
AuthorizedKeysFile $folder/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PidFile $folder/sshd-$host.pid
MaxStartups 50
CONFIG
    "$(dirname "$0")/on.sh" "$folder" "$host" /usr/sbin/sshd -f "$folder/sshd-$host"
    address=$((address + 1))
done
