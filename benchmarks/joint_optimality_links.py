"""The links of many pipelines at once, for the exact programme of `benchmarks.joint_optimality`.

In the shapes, P are pipelines, and K + 1 is the largest number of links of one.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

POWER_STEPS, AT_PRICE_STEPS, FOR_LOAD_STEPS, LEAST_PART = 30, 3, 6, 1e-7


@dataclass(frozen=True)
class Wires:
    """Full-duplex wires with equal rates in both directions.

    Args:
        capacity_bps: Rates; 0 means no link. (P, K + 1)
        total: Capacity of the channel.
    """

    capacity_bps: Floats
    total: float

    transfers_per_load = 2
    """A micro-batch loads a wire for the time of one transfer, and waits for two transfers."""
    share_power = False

    def kept(self, chosen: Bools) -> "Wires":
        return replace(self, capacity_bps=self.capacity_bps[chosen])

    def divided(self, shares: Floats) -> "Wires":
        return self

    def watts(self) -> Floats:
        """Returns the powers forward and backward. (2, P, K + 1)"""
        return np.zeros((2, *self.capacity_bps.shape))

    def seconds_per_bit(self, shares: Floats) -> Floats:
        return np.divide(1.0, shares, out=np.zeros_like(shares), where=shares > 0)

    def shares_at_price(self, price: Floats) -> Floats:
        """Returns the shares B that minimise B plus the price of all transfers of a bit, 2 / B."""
        return self._limited(np.sqrt(2 * price))

    def shares_for_load(self, seconds: Floats) -> Floats:
        """Returns the least shares that load a link for at most some seconds for each bit."""
        return self._limited(1 / seconds)

    def _limited(self, shares: Floats) -> Floats:
        return np.asarray(np.minimum(shares, np.minimum(self.capacity_bps, self.total)))


@dataclass(frozen=True)
class Radios:
    """Half-duplex radios, with rates of (1) without mu.

    A device sends ahead on one link and back on the link before it, and both powers have one limit together.
    At first, each of them is as large as this limit, so no round takes less time. `divided` divides the power.

    Args:
        signal: h / N0, the same ahead and back, in Hz/W. (P, K + 1)
        limit_watts: Largest power of the senders. (2, P, K + 1)
        part: The part of it that is used. (2, P, K + 1)
        nats_per_bit: log 2 over the efficiency of (1), the same ahead and back; 0 means no link. (P, K + 1)
        total: Bandwidth of the channel in Hz.
    """

    signal: Floats
    limit_watts: Floats
    part: Floats
    nats_per_bit: Floats
    total: float

    transfers_per_load = 1
    """A micro-batch loads a radio for the time of both transfers, and waits for the same transfers."""
    share_power = True

    def kept(self, chosen: Bools) -> "Radios":
        return replace(
            self,
            signal=self.signal[chosen],
            limit_watts=self.limit_watts[:, chosen],
            part=self.part[:, chosen],
            nats_per_bit=self.nats_per_bit[chosen],
        )

    def divided(self, shares: Floats) -> "Radios":
        """Returns the radios with the best powers for some shares.

        If shares are best for given powers, they imply the price of a second on each link. At these prices, a little
        more power must gain as much on one link of a device as on the other. The whole problem is convex in
        logarithms. So if shares and powers are best for each other at the same prices, they are optimal.

        Args:
            shares: The best ones for the present powers. (P, K + 1)
        """
        used = self.nats_per_bit > 0
        shares = self._limited(shares)
        seconds, slope = self._curve(shares)
        price = self.nats_per_bit / np.where(used, seconds * slope, 1.0)
        ratio = self.signal * self.limit_watts / shares

        def gains(ratio: Floats, price: Floats, part: Floats) -> Floats:
            """Returns what more power of each device gains on one of its links. (P, K)"""
            received = part * ratio
            return np.asarray(price * ratio / ((1 + received) * np.log1p(received) ** 2))

        low, high = np.zeros_like(shares[:, 1:]), np.ones_like(shares[:, 1:])
        for _ in range(POWER_STEPS):
            middle = (low + high) / 2
            ahead = gains(ratio[0, :, 1:], price[:, 1:], middle)
            more = ahead > gains(ratio[1, :, :-1], price[:, :-1], 1 - middle)
            low, high = np.where(more, middle, low), np.where(more, high, middle)
        part = np.ones_like(self.part)
        part[0, :, 1:] = np.where(used[:, 1:], high, 1.0)
        part[1, :, :-1] = np.where(used[:, 1:], 1 - low, 1.0)
        return replace(self, part=part)

    def watts(self) -> Floats:
        """Returns the powers ahead and back. (2, P, K + 1)"""
        return self.part * self.limit_watts

    def seconds_per_bit(self, shares: Floats) -> Floats:
        """Returns the time of a bit in both directions together."""
        return self._curve(self._limited(shares))[0]

    def shares_at_price(self, price: Floats) -> Floats:
        """Returns the shares B that minimise B plus the price of both transfers of a bit.

        Newton's method solves log B = log(-price dt / dlog B) with a constant slope, which is exact on wires.
        """
        shares = np.full(self.nats_per_bit.shape, self.total)
        for _ in range(AT_PRICE_STEPS):
            seconds, slope = self._curve(shares)
            shares = self._limited(np.sqrt(shares * price * seconds * slope))
        return np.where(self.nats_per_bit > 0, shares, 0.0)

    def shares_for_load(self, seconds: Floats) -> Floats:
        """Returns the least shares that load a link for at most some seconds for each bit.

        The logarithm of the load is convex in that of the share, so Newton's method ascends to the share.
        """
        shares = np.full(self.nats_per_bit.shape, LEAST_PART * self.total)
        for _ in range(FOR_LOAD_STEPS):
            load, slope = self._curve(shares)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                shares = self._limited(shares * (load / seconds) ** (1 / slope))
        return np.where(self.nats_per_bit > 0, shares, 0.0)

    def _limited(self, shares: Floats) -> Floats:
        return np.minimum(np.maximum(shares, LEAST_PART * self.total), self.total)

    def _curve(self, shares: Floats) -> tuple[Floats, Floats]:
        """Returns the time t of a bit in both directions, and -dlog t / dlog B. (P, K + 1) each"""
        ratio = self.signal * self.watts() / shares
        nats = np.log1p(ratio)
        ahead, back = 1 / nats
        slope_ahead, slope_back = 1 - ratio / ((1 + ratio) * nats)
        both = ahead + back
        return self.nats_per_bit * both / shares, (ahead * slope_ahead + back * slope_back) / both
