"""`make bench`: every measurement that needs no data sets."""

from benchmarks import memory, throughput, transport

for benchmark in (transport, throughput, memory):
    print(f"== {benchmark.__name__}: {(benchmark.__doc__ or '').splitlines()[0]}", flush=True)
    benchmark.main()
