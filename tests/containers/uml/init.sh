#!/bin/sh
# Process 1 of a User-Mode Linux guest. Its root file system shows the files of the host, read-only, under an
# overlay in memory. So the guest may write anywhere without changing the host. Only the folder UML_SHARED is
# shared: it is writable at /shared.
export PATH=/usr/sbin:/sbin:/usr/bin:/bin HOME=/root
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
mkdir -p /run/lock /run/netns /shared /lib/modules
umount -l /former 2>/dev/null
stty -echo -onlcr raw 2>/dev/null
mount -t hostfs none /shared -o "$UML_SHARED"
ln -sfn "$modules" "/lib/modules/$(uname -r)"
for module in ipv6 veth bridge sch_netem sch_tbf sch_htb cls_u32; do
    modprobe $module || echo "UML-WARNING no module $module"
done

hostname uml
ip link set lo up
echo UML-READY
# sh and its commands must not read the console directly, so cat forwards the commands that the host writes.
cat | sh
echo o >/proc/sysrq-trigger # power off: the host has closed the console
sleep 10
