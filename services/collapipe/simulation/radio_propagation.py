"""Radio propagation: positions of hosts, gains between them, noise and interference.

A gain is log-distance path loss times block fading. Fading is drawn anew every round and is the same in both
directions. Positions are in m.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BOLTZMANN = 1.380649e-23  # J/K
_REFERENCE_DISTANCE_M = 1.0
"""Distance of the reference loss. Shorter distances count as this one."""


def positions_in_disc(
    rng: np.random.Generator, count: int, radius_m: float, centre: Floats
) -> Floats:
    """Draws points (count, 2) that are uniform over a disc around `centre` (2,)."""
    radii = radius_m * np.sqrt(rng.random(count))
    angles = 2 * math.pi * rng.random(count)
    return centre + np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def path_gain(positions: Floats, reference_loss_db: float, exponent: float) -> Floats:
    """Returns the power gain between any two points, by log-distance path loss.

    Args:
        positions: (n, 2)
        reference_loss_db: Loss at 1 m, antennas included.
        exponent: 2 in free space, 3 to 4 through walls.

    Returns:
        (n, n), symmetric, with 0 from a point to itself.
    """
    offsets = positions[:, None, :] - positions[None, :, :]
    distances = np.maximum(np.hypot(offsets[..., 0], offsets[..., 1]), _REFERENCE_DISTANCE_M)
    gains: Floats = 10 ** (-(reference_loss_db + 10 * exponent * np.log10(distances)) / 10)
    np.fill_diagonal(gains, 0.0)
    return gains


def rayleigh_fading(rng: np.random.Generator, count: int, branches: int) -> Floats:
    """Draws the fading between any two points: (count, count), symmetric, with mean 1.

    Args:
        branches: Number of independent fading powers that are averaged. 1 is Rayleigh fading, whose power is
            exponential. A wide band or several antennas have more.
    """
    drawn = rng.gamma(branches, 1 / branches, size=(count, count))
    upper = np.triu(drawn, 1)
    symmetric: Floats = upper + upper.T
    return symmetric


def noise_density(noise_figure_db: float, temperature_kelvin: float) -> float:
    """Returns the noise density N0 of a receiver, in W/Hz: k T F."""
    return _BOLTZMANN * temperature_kelvin * 10 ** (noise_figure_db / 10)


def interference_density(gains: Floats, radiated_watts: Floats, bandwidth_hz: float) -> Floats:
    """Returns the interference that every receiver gets from the transmitters of other clusters.

    Args:
        gains: (n, n) from transmitter to receiver.
        radiated_watts: (clusters, n): mean power that each host transmits for each cluster, spread evenly
            over the band.
        bandwidth_hz: Width of the band that all clusters use.

    Returns:
        (clusters, n): I0 in W/Hz at each host while it receives for each cluster.
    """
    received = radiated_watts @ gains / bandwidth_hz
    return np.asarray(received.sum(axis=0) - received)
