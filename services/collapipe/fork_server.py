"""`python -m collapipe.fork_server`: imports the code of stage hosts once, and forks the hosts of a local testbed.

Importing torch and transformers takes seconds. A forked host starts without them, and shares their memory with the others.
A fork copies only the thread that calls it, so this process has one thread and uses neither gRPC nor torch.

Requests and answers are lines of JSON. A request on the standard input is {"module", "arguments", "log", "append"}. The
answer on the standard output is {"pid"}. When a process ends, a line {"pid", "exit"} follows, with the exit code as in
`subprocess.Popen.returncode`. This process ends when its standard input does.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import sys
from typing import Any

_ROLES = ("control_unit", "device_agent", "edge_server")


def main() -> None:
    """Serves requests until the client goes away. In a forked process, this runs the module of the request."""
    _import_hosts()
    request = _fork_on_request()
    if request is not None:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _import_hosts() -> None:
    # OpenBLAS reads it when it is imported, and would start threads.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for role in _ROLES:
        importlib.import_module(f"collapipe.{role}.app")
    del os.environ["OPENBLAS_NUM_THREADS"]
    from collapipe.models.families import FAMILIES, adapter_class

    for family in FAMILIES:
        adapter_class(family)
    # A collection would write to the objects that the processes share, so the kernel would copy them.
    gc.collect()
    gc.freeze()


def _fork_on_request() -> dict[str, Any] | None:
    """Returns the request in the forked process, and `None` in this one when the standard input ends."""
    ends: dict[int, int] = {}
    """The pid of each process, by a pipe that the kernel closes when the process ends."""
    while True:
        ready, _, _ = select.select([0, *ends], [], [])
        for end in set(ready) - {0}:
            os.close(end)
            pid, status = os.waitpid(ends.pop(end), 0)
            _answer({"pid": pid, "exit": os.waitstatus_to_exitcode(status)})
        if 0 in ready:
            line = _read_line()
            if not line:
                return None
            request: dict[str, Any] = json.loads(line)
            end, _held_open = os.pipe()
            pid = os.fork()
            if pid == 0:
                for inherited in (end, *ends):
                    os.close(inherited)
                _become(request)
                return request
            os.close(_held_open)
            ends[end] = pid
            _answer({"pid": pid})


def _read_line() -> bytes:
    """Reads one line without a buffer, because `select` would not see what is in one. Returns b"" at the end."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line


def _answer(document: dict[str, int]) -> None:
    os.write(1, json.dumps(document).encode() + b"\n")


def _become(request: dict[str, Any]) -> None:
    """Makes a forked process like one that the client started: its session, its files and its command line."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    kept = os.O_APPEND if request["append"] else os.O_TRUNC
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | kept, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [request["module"], *request["arguments"]]
    _show_command_line([sys.executable, "-m", *sys.argv])


def _show_command_line(line: list[str]) -> None:
    """Overwrites the command line that `ps` shows, as far as there is room for it.

    The last argument of this process is long, to make room.
    """
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    first, last = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    shown = "\0".join(line).encode()[: last - first - 1]
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, shown, len(shown))


if __name__ == "__main__":
    main()
