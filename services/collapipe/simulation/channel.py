"""The radio: where hosts are, how much of a signal arrives, what else is heard.

Gains are log-distance path loss times block fading, drawn anew every round and the same in both directions. Everything random
comes from a generator that is given, so that a seed is a world.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BOLTZMANN = 1.380649e-23  # J/K
_NEAREST_M = 1.0  # the reference distance of the path loss; nothing is nearer


def positions_in_disc(
    rng: np.random.Generator, count: int, radius_m: float, centre: Floats
) -> Floats:
    """Draws points, evenly over a disc.

    Args:
        rng: Source of randomness.
        count: Number of points.
        radius_m: Of the disc.
        centre: (2,) in m.

    Returns:
        (count, 2) in m.
    """
    radii = radius_m * np.sqrt(rng.random(count))
    angles = 2 * math.pi * rng.random(count)
    return centre + np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def path_gain(positions: Floats, reference_loss_db: float, exponent: float) -> Floats:
    """Power gain between any two points: log-distance path loss.

    Args:
        positions: (n, 2) in m.
        reference_loss_db: Loss at 1 m, antennas included.
        exponent: 2 in free space, 3 to 4 through walls.

    Returns:
        (n, n), symmetric; 0 from a point to itself.
    """
    offsets = positions[:, None, :] - positions[None, :, :]
    distances = np.maximum(np.hypot(offsets[..., 0], offsets[..., 1]), _NEAREST_M)
    gains: Floats = 10 ** (-(reference_loss_db + 10 * exponent * np.log10(distances)) / 10)
    np.fill_diagonal(gains, 0.0)
    return gains


def rayleigh_fading(rng: np.random.Generator, count: int, branches: int) -> Floats:
    """Draws one block's fading between any two of `count` points.

    Args:
        rng: Source of randomness.
        count: Number of points.
        branches: Independent ones whose powers are averaged: 1 is plain Rayleigh fading, an exponential gain; a wide
            band or several antennas have more.

    Returns:
        (count, count), symmetric, of mean 1.
    """
    drawn = rng.gamma(branches, 1 / branches, size=(count, count))
    upper = np.triu(drawn, 1)
    symmetric: Floats = upper + upper.T
    return symmetric


def noise_density(noise_figure_db: float, temperature_kelvin: float) -> float:
    """N0 of a receiver, in W/Hz: k T F."""
    return _BOLTZMANN * temperature_kelvin * 10 ** (noise_figure_db / 10)


def interference_density(gains: Floats, radiated_watts: Floats, bandwidth_hz: float) -> Floats:
    """What every receiver hears from the transmitters of other clusters.

    Args:
        gains: (n, n) from transmitter to receiver.
        radiated_watts: (clusters, n): mean power of each host on behalf of each cluster, spread evenly over the band.
        bandwidth_hz: Of the band that all clusters reuse.

    Returns:
        (clusters, n): I0 in W/Hz at each host while it receives for each cluster.
    """
    heard = radiated_watts @ gains / bandwidth_hz
    return np.asarray(heard.sum(axis=0) - heard)
