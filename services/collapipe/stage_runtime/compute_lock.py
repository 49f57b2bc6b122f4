"""The one processor of a host, as its threads share it."""

import threading

COMPUTE_LOCK = threading.Lock()
"""One thread computes at a time: the random state is the process's, and the plan counts one processor a host.

Who needs random numbers seeds, draws and computes without letting go of it in between. An emulated processor is waited
for with the lock held: it is busy."""
