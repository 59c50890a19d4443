#!/bin/bash
# Two hosts on one machine: network namespaces joined by a virtual cable (eth0 in each), with host names of their own and an sshd each.
# hosts_up.sh DIR makes them, with keys and settings in DIR; on.sh DIR a|b COMMAND… runs a command there; hosts_down.sh DIR removes them.
# Names of namespaces begin with DIR's last part, so that several pairs can stand side by side. Needs root, iproute2, openssh.
set -eu
folder=$1 name=$(basename "$1")
mkdir -p "$folder/bin" /run/sshd
ssh-keygen -q -t ed25519 -N '' -f "$folder/key"
ssh-keygen -q -t ed25519 -N '' -f "$folder/hostkey"
printf '127.0.0.1 localhost\n10.77.0.1 host-a\n10.77.0.2 host-b\n' > "$folder/hosts"

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

for host in a b; do ip netns add "$name-$host"; done
ip link add eth0 netns "$name-a" type veth peer name eth0 netns "$name-b"
address=1
for host in a b; do
    ip -n "$name-$host" addr add "10.77.0.$address/24" dev eth0
    ip -n "$name-$host" link set eth0 up
    ip -n "$name-$host" link set lo up
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
