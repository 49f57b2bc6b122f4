#!/bin/sh
# Process 1 of a User-Mode Linux guest. Its root file system shows the files of the host, read-only, under an
# overlay in memory. So the guest may write anywhere without changing the host. Only the folder UML_SHARED is
# shared: it is writable at /shared. A disk image, if there is one, is mounted at /var/lib/docker.
export PATH=/usr/sbin:/sbin:/usr/bin:/bin HOME=/root
unset DOCKER_HOST
modules=/usr/lib/uml/modules/$(uname -r)

if [ "$1" != inside ]; then
    mount -t proc proc /proc
    insmod "$modules/kernel/fs/overlayfs/overlay.ko"
    mount -t tmpfs -o size=2g tmpfs /mnt
    mkdir /mnt/upper /mnt/work /mnt/root
    mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
    cd /mnt/root && mkdir -p former && mount --make-rprivate / && pivot_root . former
    exec chroot . /bin/sh "$0" inside
fi

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/pts /dev/shm /dev/mqueue
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=755 run /run
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr
mkdir -p /run/lock /run/netns /var/lib/docker /shared /lib/modules
umount -l /former 2>/dev/null
stty -echo -onlcr raw 2>/dev/null
mount -t hostfs none /shared -o "$UML_SHARED"
ln -sfn "$modules" "/lib/modules/$(uname -r)"
for module in ipv6 veth sch_netem sch_tbf sch_htb cls_u32; do
    modprobe $module || echo "UML-WARNING no module $module"
done

if [ -b /dev/ubda ]; then # the guest has a disk for docker
    mount -t ext4 -o noatime /dev/ubda /var/lib/docker
    mount -t tmpfs cgroup /sys/fs/cgroup
    for controller in $(awk '!/^#/ && $4 == 1 {print $1}' /proc/cgroups); do
        mkdir "/sys/fs/cgroup/$controller"
        mount -t cgroup -o "$controller" cgroup "/sys/fs/cgroup/$controller"
    done
    mkdir /sys/fs/cgroup/systemd && mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
    for module in bridge br_netfilter iptable_nat iptable_filter xt_MASQUERADE xt_addrtype xt_conntrack; do
        modprobe $module || echo "UML-WARNING no module $module"
    done
    # This kernel lacks the nat chains of nftables, so use the older iptables.
    for table in iptables ip6tables; do
        [ -x /usr/sbin/$table-legacy ] && ln -sfn /usr/sbin/$table-legacy /etc/alternatives/$table
    done
    echo 1 >/proc/sys/net/ipv4/ip_forward
fi

hostname uml
ip link set lo up
echo UML-READY
# sh and its commands must not read the console directly, so cat forwards the commands that the host writes.
cat | sh
echo o >/proc/sysrq-trigger # power off: the host has closed the console
sleep 10
