"""What the links carry, and what they could."""

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
    graph,
)

_USE = f"sum by (link) (rate(collapipe_link_transfer_seconds_total{{{ON_LINK}}}[$__rate_interval]))"

LINKS = Definition(
    uid="collapipe-links",
    title="CollaPipe: links",
    description="What the links between stages carry, and what they could.",
    answers=[
        answer(
            "Fullest link",
            (f"topk(1, {_USE})", "{{link}}"),
            PERCENT,
            "Share of the time in which something was arriving. From 80 % on (red) the link holds the job back: a lossy codec "
            "(schedule.codecs), a larger share of the channel, or another order of devices helps.",
            thresholds=[(0.5, "orange"), (0.8, "red")],
            decimals=0,
        ),
        answer(
            "Narrowest link",
            (f"bottomk(1, link:goodput_bps:ratio_increase1m{{{ON_LINK}}})", "{{link}}"),
            BITS_PER_SECOND,
            "Bits over the time that they took to arrive, of the slowest link that was used within a minute. Matters only "
            "if it is full, too.",
        ),
        answer(
            "Longest round trip",
            (
                f"topk(1, max by (link) (collapipe_link_round_trip_seconds{{{ON_LINK}}}))",
                "{{link}}",
            ),
            SECONDS,
            "Least time of a message to the other end and back. Beyond the time of a micro-batch, only more micro-batches in flight "
            "hide it.",
            thresholds=[(0.1, "orange"), (0.5, "red")],
            no_value="not probed",
        ),
        answer(
            "Full links",
            (f"count({_USE} > 0.8) or vector(0)", "links"),
            COUNT,
            "Links over which something arrives more than 80 % of the time.",
            thresholds=[(1, "red")],
            names=False,
        ),
    ],
    panels=[
        graph(
            "Goodput",
            [
                (
                    f"8 * sum by (link) (rate(collapipe_link_transfer_bytes_total{{{ON_LINK}}}[$__rate_interval])) "
                    f"/ (sum by (link) (rate(collapipe_link_transfer_seconds_total{{{ON_LINK}}}[$__rate_interval])) > 0)",
                    "{{link}}",
                )
            ],
            BITS_PER_SECOND,
            "Rate at which frames arrive, as their receiver sees it, while they arrive. A step down: the link became narrower, "
            "or is shared. No line: nothing was sent.",
        ),
        graph(
            "Use of the links",
            [(_USE, "{{link}}")],
            PERCENT,
            "Share of the time in which something arrives. Goodput says how wide a link is, this says whether it is full.",
            most=1.0,
            thresholds=[(0.8, "red")],
        ),
        graph(
            "Rate limits",
            [
                (
                    f"max by (link) (collapipe_link_rate_limit_bps{{{ON_LINK}}})",
                    "{{link}}",
                )
            ],
            BITS_PER_SECOND,
            "What senders pace at: the least of the plan's share of the channel, the radio's rate and the shaper's; 0 is no "
            "limit.",
            steps=True,
        ),
        graph(
            "Goodput of the limit",
            [
                (
                    f"max by (link) (link:goodput_bps:ratio_increase1m{{{ON_LINK}}}) "
                    f"/ on (link) (max by (link) (collapipe_link_rate_limit_bps{{{ON_LINK}}}) > 0)",
                    "{{link}}",
                )
            ],
            PERCENT,
            "100 %: the link gives what its sender was allowed. Far below: the network behind it is the limit, and LinkBelowItsRate "
            "fires.",
            most=1.0,
            thresholds=[(0.5, "red")],
        ),
        graph(
            "Round trip",
            [
                (
                    f"max by (link) (collapipe_link_round_trip_seconds{{{ON_LINK}}})",
                    "{{link}}",
                )
            ],
            SECONDS,
            "Least of the last probe. Links in use are not probed again: their streams tell their rate, not their delay.",
            steps=True,
        ),
        graph(
            "Probed rate",
            [(f"max by (link) (collapipe_link_probed_bps{{{ON_LINK}}})", "{{link}}")],
            BITS_PER_SECOND,
            "What the last probe saw at the receiver, also of links that no plan uses: what the scheduler could choose instead.",
            steps=True,
        ),
        graph(
            "Bytes by codec",
            [
                (
                    f"sum by (codec) (rate(collapipe_link_transfer_bytes_total{{{ON_LINK}}}[$__rate_interval]))",
                    "{{codec}}",
                )
            ],
            BYTES_PER_SECOND,
            "On the wire, of all chosen links. int8 is a quarter of fp32 for the same activations.",
            stacked=True,
        ),
        graph(
            "Bytes of each link",
            [
                (
                    f"sum by (link) (rate(collapipe_link_transfer_bytes_total{{{ON_LINK}}}[$__rate_interval]))",
                    "{{link}}",
                )
            ],
            BYTES_PER_SECOND,
            "On the wire, averaged over all of the time, also when nothing is sent.",
        ),
        graph(
            "Radio: gain",
            [(f"max by (link) (collapipe_radio_channel_gain{{{ON_LINK}}})", "{{link}}")],
            NONE,
            "Power gain of the channel. Only hosts with a radio that tells (or an emulated one) have it.",
            span=8,
        ),
        graph(
            "Radio: noise",
            [(f"max by (link) (collapipe_radio_noise_watts_per_hertz{{{ON_LINK}}})", "{{link}}")],
            "suffix: W/Hz",
            "Noise and interference at the receiver, a hertz.",
            span=8,
        ),
        graph(
            "Radio: transmit power",
            [(f"max by (link) (collapipe_radio_transmit_power_watts{{{ON_LINK}}})", "{{link}}")],
            WATTS,
            "What the plan gives the sender: more power is a higher rate, and energy from its budget.",
            span=8,
        ),
    ],
)
