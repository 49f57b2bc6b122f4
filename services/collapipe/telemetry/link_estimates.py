"""Estimates of links: the goodput that the receiver measured, and the reports of the sender."""

from dataclasses import dataclass, replace

from collapipe.telemetry.sample_window import Group, SampleWindow

_MAX_BPS = 1e12
_MAX_RATIO_TO_LIMIT = 1.5
"""A shaper may be imprecise or let a burst pass. A higher goodput is a wrong measurement."""


@dataclass(frozen=True)
class LinkEstimate:
    """Measured values of one link; `None` means that the window has no usable samples."""

    goodput_bps: float | None = None
    """r_k of docs/scheduling.md (3), measured by the receiver, because a send only fills a buffer."""
    transfer_bytes: float = 0.0
    """Number of bytes behind `goodput_bps`."""
    round_trip_seconds: float | None = None
    rate_limit_bps: float | None = None
    """Rate to which the sender limits itself; 0 means no limit."""
    probed_bps: float | None = None
    """Rate that the last probe measured."""
    channel_gain: float | None = None
    """h_k of docs/scheduling.md (1)."""
    noise_watts_per_hertz: float | None = None
    """N0 + I0_k of docs/scheduling.md (1)."""
    transmit_power_watts: float | None = None


def estimate_links(window: SampleWindow) -> dict[str, LinkEstimate]:
    """Computes the estimates of all links with samples, by "sender>receiver"."""
    found: dict[str, LinkEstimate] = {}
    for group, link in window.groups("link"):
        sender, _, receiver = link.partition(">")
        if group.host == sender:
            found[link] = _with_reports_of_sender(window, group, found.get(link, LinkEstimate()))
        if group.host == receiver:
            goodput_bps, transfer_bytes = _goodput(window, sender, group)
            found[link] = replace(
                found.get(link, LinkEstimate()),
                goodput_bps=goodput_bps,
                transfer_bytes=transfer_bytes,
            )
    return {link: one for link, one in sorted(found.items()) if one != LinkEstimate()}


def _with_reports_of_sender(
    window: SampleWindow, group: Group, estimate: LinkEstimate
) -> LinkEstimate:
    return replace(
        estimate,
        round_trip_seconds=window.latest(group, "link_round_trip_seconds", 3600.0),
        rate_limit_bps=window.latest(group, "link_rate_limit_bps", _MAX_BPS, 0.0),
        probed_bps=window.latest(group, "link_probed_bps", _MAX_BPS),
        channel_gain=window.latest(group, "radio_channel_gain", 1e3),
        noise_watts_per_hertz=window.latest(group, "radio_noise_watts_per_hertz", 1.0),
        transmit_power_watts=window.latest(group, "radio_transmit_power_watts", 1e4, 0.0),
    )


def _goodput(window: SampleWindow, sender: str, group: Group) -> tuple[float | None, float]:
    """Returns the goodput of a link in bit/s, and the bytes behind it.

    The goodput is the bits that arrived, divided by the time that they took to arrive.

    Args:
        group: The link, as its receiver reports it.
    """
    arrived = window.increases(group, "link_transfer_bytes_total", "link_transfer_seconds_total")
    if not arrived or not arrived[0]:
        return None, 0.0
    transfer_bytes, seconds = arrived
    most, reason = _MAX_BPS, ""
    limits = [
        value
        for one in window.series(Group(sender, group.labels), "link_rate_limit_bps")
        for _, value in one.points
    ]
    if limits and min(limits) > 0:
        most = min(most, _MAX_RATIO_TO_LIMIT * max(limits))
        reason = f"; its sender limits itself to {max(limits):.4g}"
    rate_bps = 8 * transfer_bytes / seconds if seconds else float("inf")
    what = f"{group.host}: bit/s from {sender}"
    goodput_bps = window.plausible(what, rate_bps, 1.0, most, reason)
    return goodput_bps, transfer_bytes if goodput_bps is not None else 0.0
