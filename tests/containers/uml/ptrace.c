/* Lets User-Mode Linux 6.1 run on processors with AMX.

   It keeps the extended registers of a process in a buffer of fixed size. With AMX there are more, and the kernel of this machine
   refuses to write only a part of them. So this `ptrace`, which LD_PRELOAD puts before that of the C library, reads all registers,
   replaces the part that was given, and writes all. That part comes first, and has the same layout. */

#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char all[1 << 16]; /* The stacks of User-Mode Linux are small, and only one of its threads calls `ptrace`. */

long ptrace(enum __ptrace_request request, ...)
{
    va_list rest;
    va_start(rest, request);
    long pid = va_arg(rest, pid_t);
    void *address = va_arg(rest, void *), *data = va_arg(rest, void *);
    va_end(rest);

    int writes = request == PTRACE_SETREGSET;
    if ((writes || request == PTRACE_GETREGSET) && (long)address == NT_X86_XSTATE) {
        struct iovec *given = data, whole = {all, sizeof all};
        if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, address, &whole) < 0)
            return -1;
        if (given->iov_len > whole.iov_len)
            given->iov_len = whole.iov_len;
        if (writes) {
            memcpy(all, given->iov_base, given->iov_len);
            return syscall(SYS_ptrace, PTRACE_SETREGSET, pid, address, &whole);
        }
        memcpy(given->iov_base, all, given->iov_len);
        return 0;
    }
    if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
        long word; /* The system call stores it, and the function returns it. */
        if (syscall(SYS_ptrace, request, pid, address, &word) < 0)
            return -1;
        errno = 0;
        return word;
    }
    return syscall(SYS_ptrace, request, pid, address, data);
}
