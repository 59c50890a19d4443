#!/bin/bash
# Twelve hosts on one machine: network namespaces on a virtual switch (eth0 in each), with host names of their own and an sshd each.
# hosts_up.sh DIR makes them, with keys and settings in DIR; on.sh DIR a|…|l COMMAND… runs a command there; hosts_down.sh DIR removes them.
# Names of namespaces begin with DIR's last part, so that several sets can stand side by side. Needs root, iproute2, openssh.
set -eu
folder=$1 name=$(basename "$1")
mkdir -p "$folder/bin" /run/sshd
ssh-keygen -q -t ed25519 -N '' -f "$folder/key"
ssh-keygen -q -t ed25519 -N '' -f "$folder/hostkey"
echo '127.0.0.1 localhost' > "$folder/hosts"

# pdsh and mpirun find this ssh on the PATH that on.sh sets; it needs nothing of the user's own settings.
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
    # Where runs are disturbed a step takes time, but little of the processor, which all hosts share.
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
