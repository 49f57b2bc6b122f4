"""The dashboard of the links: what they carry, and what they could carry."""

from definitions.elements import (
    BITS_PER_SECOND,
    BYTES_PER_SECOND,
    COUNT,
    NONE,
    ON_LINK,
    PERCENT,
    SECONDS,
    WATTS,
    Definition,
    answer,
    by_link,
    graph,
)

_BYTES = f"rate(collapipe_link_transfer_bytes_total{{{ON_LINK}}}[$__rate_interval])"
_USE = f"sum by (link) (rate(collapipe_link_transfer_seconds_total{{{ON_LINK}}}[$__rate_interval]))"

LINKS = Definition(
    uid="collapipe-links",
    title="CollaPipe: links",
    description="What the links between stages carry, and what they could carry.",
    answers=[
        answer(
            "Fullest link",
            (f"topk(1, {_USE})", "{{link}}"),
            PERCENT,
            "Share of the time in which data arrives over the busiest link. From 80 % on (red), the link holds the job back. A "
            "lossy codec (schedule.codecs), a larger share of the channel or another order of devices helps.",
            thresholds=[(0.5, "orange"), (0.8, "red")],
            decimals=0,
        ),
        answer(
            "Slowest link",
            (f"bottomk(1, link:goodput_bps:ratio_increase1m{{{ON_LINK}}})", "{{link}}"),
            BITS_PER_SECOND,
            "Bits divided by the time that they took to arrive, of the slowest link that was used in the last minute. It matters "
            "only if the link is also full.",
        ),
        answer(
            "Longest round trip",
            (
                f"topk(1, max by (link) (collapipe_link_round_trip_seconds{{{ON_LINK}}}))",
                "{{link}}",
            ),
            SECONDS,
            "Shortest time of a message to the other end and back. If it is longer than a micro-batch, only more micro-batches "
            "in flight hide it.",
            thresholds=[(0.1, "orange"), (0.5, "red")],
            no_value="no link was probed",
        ),
        answer(
            "Full links",
            (f"count({_USE} > 0.8) or vector(0)", "links"),
            COUNT,
            "Number of links over which data arrives for more than 80 % of the time.",
            thresholds=[(1, "red")],
            names=False,
        ),
    ],
    panels=[
        graph(
            "Goodput",
            (f"8 * sum by (link) ({_BYTES}) / ({_USE} > 0)", "{{link}}"),
            BITS_PER_SECOND,
            "Rate at which frames arrive, measured by the receiver while they arrive. After a step down, the link is slower or "
            "shared. Without a line, nothing was sent.",
        ),
        graph(
            "Use of the links",
            (_USE, "{{link}}"),
            PERCENT,
            "Share of the time in which data arrives. Goodput shows how fast a link is; this panel shows whether it is full.",
            most=1.0,
            thresholds=[(0.8, "red")],
        ),
        graph(
            "Rate limits",
            by_link("collapipe_link_rate_limit_bps"),
            BITS_PER_SECOND,
            "Rate to which a sender limits itself: the smallest of the plan's share of the channel, the rate of the radio and the "
            "rate of the shaper. 0 means no limit.",
            steps=True,
            no_value="no job used these links",
        ),
        graph(
            "Goodput relative to the limit",
            (
                f"max by (link) (link:goodput_bps:ratio_increase1m{{{ON_LINK}}}) "
                f"/ on (link) (max by (link) (collapipe_link_rate_limit_bps{{{ON_LINK}}}) > 0)",
                "{{link}}",
            ),
            PERCENT,
            "At 100 %, the link carries what its sender may send. Far below, the network is slower than the limit, and the alert "
            "LinkBelowItsRate fires.",
            most=1.0,
            thresholds=[(0.5, "red")],
            no_value="no sender has a limit",
        ),
        graph(
            "Round trip",
            by_link("collapipe_link_round_trip_seconds"),
            SECONDS,
            "Shortest round trip of the last probe. Links in use are not probed again: their streams show the rate, but not the "
            "delay.",
            steps=True,
            no_value="no link was probed: only the strategy dssra probes links",
        ),
        graph(
            "Probed rate",
            by_link("collapipe_link_probed_bps"),
            BITS_PER_SECOND,
            "Rate that the receiver measured during the last probe. It also shows links that no plan uses, which the scheduler "
            "could choose instead.",
            steps=True,
            no_value="no link was probed: only the strategy dssra probes links",
        ),
        graph(
            "Bytes by codec",
            (f"sum by (codec) ({_BYTES})", "{{codec}}"),
            BYTES_PER_SECOND,
            "Bytes on the wire of all chosen links. int8 needs a quarter of the bytes of fp32 for the same activations.",
            stacked=True,
        ),
        graph(
            "Bytes of each link",
            (f"sum by (link) ({_BYTES})", "{{link}}"),
            BYTES_PER_SECOND,
            "Bytes on the wire, averaged over all of the time, including times when nothing is sent.",
        ),
        graph(
            "Radio: gain",
            by_link("collapipe_radio_channel_gain"),
            NONE,
            "Power gain of the channel. Only hosts with a radio driver, or with an emulated radio, report it.",
            span=8,
            no_value="no host has a radio driver or an emulated radio",
        ),
        graph(
            "Radio: noise",
            by_link("collapipe_radio_noise_watts_per_hertz"),
            "suffix: W/Hz",
            "Noise and interference at the receiver, per hertz.",
            span=8,
            no_value="no host has a radio driver or an emulated radio",
        ),
        graph(
            "Radio: transmit power",
            by_link("collapipe_radio_transmit_power_watts"),
            WATTS,
            "Power that the plan gives the sender. More power raises the rate, but uses more of the energy budget.",
            span=8,
            no_value="no host has a radio driver or an emulated radio",
        ),
    ],
)
