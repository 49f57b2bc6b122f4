"""Runs every measurement that needs no data sets, as `make bench` does.

python -m benchmarks [NAME...]     # by default, all of them
"""

import sys

from benchmarks import (
    allocation,
    averaging,
    codecs,
    growth,
    joint_optimality,
    memory,
    optimality,
    slices,
    throughput,
    tracing,
    transport,
)

for benchmark in (
    allocation,
    optimality,
    joint_optimality,
    transport,
    codecs,
    throughput,
    memory,
    tracing,
    averaging,
    growth,
    slices,
):
    if sys.argv[1:] and benchmark.__name__.split(".")[-1] not in sys.argv[1:]:
        continue
    print(f"== {benchmark.__name__}: {(benchmark.__doc__ or '').splitlines()[0]}", flush=True)
    benchmark.main()
