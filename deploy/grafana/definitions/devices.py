"""The dashboard of the machines: their memory, energy, temperature and sensors."""

from definitions.elements import (
    BYTES,
    COUNT,
    IN_CLUSTER,
    PERCENT,
    SECONDS,
    WATTS,
    Definition,
    answer,
    by_service,
    graph,
    timeline,
)

_HOSTS = 'job="collapipe"'

DEVICES = Definition(
    uid="collapipe-devices",
    title="CollaPipe: devices",
    description="Memory, energy, temperature and sensors of the machines.",
    answers=[
        answer(
            "Silent hosts",
            (f"count(up{{{_HOSTS}}} == 0) or vector(0)", "hosts"),
            COUNT,
            "Number of hosts that do not serve their metrics. A silent host stops every job that uses it. The alert DeviceSilent "
            "names it.",
            thresholds=[(1, "red")],
            names=False,
        ),
        answer(
            "Most memory",
            (f"topk(1, process_resident_memory_bytes{{{_HOSTS}}})", "{{service}}"),
            BYTES,
            "The process with the most memory. If it needs more than its box has, the kernel ends it.",
            no_value="no host is scraped",
        ),
        answer(
            "Hottest",
            ("topk(1, max by (service) (collapipe_temperature_celsius))", "{{service}}"),
            "celsius",
            "The hottest processor. From 80 degrees on (red), it slows itself down, and the pipeline with it.",
            thresholds=[(70, "orange"), (80, "red")],
            no_value="no sensor",
        ),
        answer(
            "Emulation overrun",
            (
                "topk(1, sum by (service) (rate(collapipe_emulation_overrun_seconds_total[$__rate_interval])))",
                "{{service}}",
            ),
            PERCENT,
            "Share of the time by which real work took longer than the emulated device would have taken. Above 5 % (orange), "
            "measured times are those of this machine. Without emulation it is 0.",
            thresholds=[(0.05, "orange"), (0.2, "red")],
            no_value="no emulated device",
            decimals=1,
        ),
    ],
    panels=[
        graph(
            "Memory",
            by_service(f"process_resident_memory_bytes{{{_HOSTS}}}"),
            BYTES,
            "Resident memory of each process. Python and torch take some hundred MB. The rest is the segment, its optimizer state "
            "and the activation stash.",
            no_value="no host is scraped",
        ),
        graph(
            "Peak memory",
            by_service("collapipe_process_peak_resident_memory_bytes"),
            BYTES,
            "Largest resident memory so far. The scheduler compares it with the memory limit of the device.",
            steps=True,
            no_value="no host is scraped",
        ),
        graph(
            "Processor",
            by_service(f"rate(process_cpu_seconds_total{{{_HOSTS}}}[$__rate_interval])", "sum"),
            PERCENT,
            "100 % is one core. A device that always computes (dashboard Pipeline) but uses little of its processor is throttled.",
            no_value="no host is scraped",
        ),
        graph(
            "Computing for clusters",
            by_service(
                f"stage:busy_seconds:rate1m{{{IN_CLUSTER}}} + stage:update_seconds:rate1m{{{IN_CLUSTER}}}",
                "sum",
            ),
            PERCENT,
            "Share of the time in which a host computes for the chosen clusters. A host near 0 could take more blocks.",
            most=1.0,
        ),
        graph(
            "Power",
            (
                "sum by (service, sensor) (rate(collapipe_energy_joules_total[$__rate_interval]))",
                "{{service}}: {{sensor}}",
            ),
            WATTS,
            "Power by sensor. `model` is no sensor: it is the configured power of the host while the host computes.",
            no_value="no box has a sensor of power, and no power is configured",
        ),
        graph(
            "Energy per sample",
            (
                "sum by (service) (max by (service, sensor) (service:power_watts:rate1m)) "
                "/ scalar(sum(cluster:trained_samples:rate1m) > 0)",
                "{{service}}",
            ),
            "joule",
            "Energy of each host, divided by the samples that all clusters train. A plan that weighs energy more "
            "(schedule.penalty_weight) lowers it where the budget is small.",
            no_value="no box has a sensor of power, or no job trained",
        ),
        graph(
            "Temperature",
            by_service("collapipe_temperature_celsius"),
            "celsius",
            "Temperature of the processor. Without a line, the box has no sensor (see Sensors).",
            thresholds=[(80, "red")],
            no_value="no box has a sensor of temperature",
        ),
        timeline(
            "Sensors",
            ("max by (service, sensor) (collapipe_sensor_present)", "{{service}}: {{sensor}}"),
            "bool_yes_no",
            "Green: the sensor works. Red: it is missing, unreadable or broken. Without an energy sensor, the watts come from the "
            "settings of the host. rapl needs root, ina3221 is part of a Jetson, and battery works while a laptop discharges.",
            [(-1, "red"), (1, "green")],
        ),
        graph(
            "Free space for state",
            ("min by (service) (collapipe_state_free_bytes)", "{{service}}"),
            BYTES,
            "Free space on the disk where the service keeps its state.",
            no_value="no host is scraped",
        ),
        graph(
            "Hosts",
            ("max by (role) (collapipe_hosts)", "{{role}}"),
            COUNT,
            "Hosts whose heartbeats reach the scheduler.",
            steps=True,
            no_value="no host is scraped",
        ),
        graph(
            "Calls that fail",
            (
                "sum by (service, grpc_method, grpc_code) "
                '(rate(grpc_server_handled_total{grpc_code!="OK"}[$__rate_interval])) > 0',
                "{{service}} {{grpc_method}}: {{grpc_code}}",
            ),
            "reqps",
            "Failed calls by method and status. CANCELLED is an ordinary end of a stream. UNAVAILABLE, DEADLINE_EXCEEDED, INTERNAL "
            "and DATA_LOSS are failures.",
            no_value="no call has failed",
        ),
        graph(
            "Calls",
            (
                "histogram_quantile(0.95, sum by (service, le) "
                '(rate(grpc_server_handling_seconds_bucket{grpc_type="unary"}[$__rate_interval])))',
                "{{service}}",
            ),
            SECONDS,
            "95 % of the short calls to a service end within this time. A service that needs seconds is overloaded.",
            no_value="no host is scraped",
        ),
    ],
)
