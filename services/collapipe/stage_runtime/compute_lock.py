"""The lock by which the threads of a host share its processor."""

import threading

COMPUTE_LOCK = threading.Lock()
"""The thread that computes holds this lock, for two reasons: torch's random state belongs to the whole
process, and plans assume one processor for each host.

A thread that needs random numbers seeds, draws and computes without releasing the lock in between. It also
waits for an emulated processor with the lock held, because that processor is busy.

An accelerator computes later, but in the order in which threads gave it work under this lock."""
