"""How the machines are."""

from definitions.elements import (
    BYTES,
    COUNT,
    IN_CLUSTER,
    PERCENT,
    SECONDS,
    WATTS,
    Definition,
    answer,
    graph,
    timeline,
)

_HOSTS = 'job="collapipe"'

DEVICES = Definition(
    uid="collapipe-devices",
    title="CollaPipe: devices",
    description="How the machines are: memory, energy, temperature, what cannot be measured.",
    answers=[
        answer(
            "Silent hosts",
            (f"count(up{{{_HOSTS}}} == 0) or vector(0)", "hosts"),
            COUNT,
            "Hosts that do not serve their metrics. One that takes part in a job stops it; DeviceSilent names it.",
            thresholds=[(1, "red")],
            names=False,
        ),
        answer(
            "Most memory",
            (f"topk(1, process_resident_memory_bytes{{{_HOSTS}}})", "{{service}}"),
            BYTES,
            "The process that holds most. Compare with what its box has: beyond it, the kernel ends the process.",
        ),
        answer(
            "Hottest",
            ("topk(1, max by (service) (collapipe_temperature_celsius))", "{{service}}"),
            "celsius",
            "The processor that is hottest. From 80 degrees on (red) it slows itself down, and the pipeline with it.",
            thresholds=[(70, "orange"), (80, "red")],
            no_value="no sensor",
        ),
        answer(
            "Behind its emulation",
            (
                "topk(1, sum by (service) (rate(collapipe_emulation_overrun_seconds_total[$__rate_interval])))",
                "{{service}}",
            ),
            PERCENT,
            "Share of the time by which real work took longer than the emulated device would have. Above 5 % (orange) times "
            "are this machine's; 0 where nothing is emulated.",
            thresholds=[(0.05, "orange"), (0.2, "red")],
            decimals=1,
        ),
    ],
    panels=[
        graph(
            "Memory",
            [(f"max by (service) (process_resident_memory_bytes{{{_HOSTS}}})", "{{service}}")],
            BYTES,
            "Resident memory of each process. Some hundred MB are Python and torch; the rest is the segment, its optimizer and "
            "the stash.",
        ),
        graph(
            "Peak of memory",
            [
                (
                    "max by (service) (collapipe_process_peak_resident_memory_bytes)",
                    "{{service}}",
                )
            ],
            BYTES,
            "Largest so far: what the scheduler compares with the memory limit of a device.",
            steps=True,
        ),
        graph(
            "Processor",
            [
                (
                    f"sum by (service) (rate(process_cpu_seconds_total{{{_HOSTS}}}[$__rate_interval]))",
                    "{{service}}",
                )
            ],
            PERCENT,
            "100 % is one core. A device that computes all the time (dashboard Pipeline) but uses little processor is throttled.",
        ),
        graph(
            "Computing for clusters",
            [
                (
                    f"sum by (service) (stage:busy_seconds:rate1m{{{IN_CLUSTER}}} + stage:update_seconds:rate1m{{{IN_CLUSTER}}})",
                    "{{service}}",
                )
            ],
            PERCENT,
            "Share of the time in which a host computes for the chosen clusters. Who is near 0 could take more blocks.",
            most=1.0,
        ),
        graph(
            "Power",
            [
                (
                    "sum by (service, sensor) (rate(collapipe_energy_joules_total[$__rate_interval]))",
                    "{{service}}: {{sensor}}",
                )
            ],
            WATTS,
            "By what measures it. `model` is none: it is the power that the host was started with, while it computes.",
        ),
        graph(
            "Energy of a sample",
            [
                (
                    "sum by (service) (max by (service, sensor) (service:power_watts:rate1m)) "
                    "/ scalar(sum(cluster:trained_samples:rate1m) > 0)",
                    "{{service}}",
                )
            ],
            "joule",
            "Of each host, over what all clusters train. A plan that weighs energy (schedule.penalty_weight) lowers it where "
            "the budget is tight.",
        ),
        graph(
            "Temperature",
            [("max by (service) (collapipe_temperature_celsius)", "{{service}}")],
            "celsius",
            "Of the processor. No line: the box shows no sensor (see Sensors).",
            thresholds=[(80, "red")],
        ),
        timeline(
            "Sensors",
            ("max by (service, sensor) (collapipe_sensor_present)", "{{service}}: {{sensor}}"),
            "bool_yes_no",
            "Green: the sensor works. Red: it is absent, forbidden or broken here; without any of energy, watts are taken from "
            "the host's settings. rapl needs root, ina3221 is a Jetson's, battery a laptop's while it discharges.",
            [(-1, "red"), (1, "green")],
        ),
        graph(
            "Room for state",
            [("min by (service) (collapipe_state_free_bytes)", "{{service}}")],
            BYTES,
            "Free on the disk where the service keeps its state.",
        ),
        graph(
            "Hosts",
            [("max by (role) (collapipe_hosts)", "{{role}}")],
            COUNT,
            "Alive by their heartbeats, as the scheduler counts.",
            steps=True,
        ),
        graph(
            "Calls that fail",
            [
                (
                    "sum by (service, grpc_method, grpc_code) "
                    '(rate(grpc_server_handled_total{grpc_code!="OK"}[$__rate_interval])) > 0',
                    "{{service}} {{grpc_method}}: {{grpc_code}}",
                )
            ],
            "reqps",
            "By method and status. CANCELLED ends streams in order; UNAVAILABLE, DEADLINE_EXCEEDED, INTERNAL and DATA_LOSS do not.",
        ),
        graph(
            "Calls",
            [
                (
                    "histogram_quantile(0.95, sum by (service, le) "
                    '(rate(grpc_server_handling_seconds_bucket{grpc_type="unary"}[$__rate_interval])))',
                    "{{service}}",
                )
            ],
            SECONDS,
            "95 % of the short calls to a service end within this time. Seconds: it is overloaded.",
        ),
    ],
)
