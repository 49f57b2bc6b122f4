"""Bandwidth shares of given links: the convex part of docs/scheduling.md (13).

Only the functions that need cvxpy import it, because the import takes more than a second.
"""

import math
import threading
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from collapipe.allocation.round_model.prediction import RoundPrediction
from collapipe.allocation.round_model.problem import RoundPlan
from collapipe.allocation.search.arrays import Bools
from collapipe.allocation.search.shared_links import LinkPosition, Point, SharedLinks

if TYPE_CHECKING:
    import cvxpy as cp

_SOLVER = "CLARABEL"
_TOLERANCES = (1e-8, 1e-6, 1e-4)
"""Accuracy relative to the objective. The solver may stall near an optimum; then it gets the next tolerance.

With free powers the first one is left out, because the next step continues from the point found.
"""


class SolverFailedError(RuntimeError):
    """The convex solver found no optimum, or not in time. `dssra.decide` keeps the current plans then."""


@dataclass(frozen=True)
class Prices:
    """Dual prices of a solution: how much one more unit changes the objective of docs/scheduling.md (13).

    Args:
        channels: Price of a unit of bandwidth, by name of the channel.
        round_seconds: Price of a second of each cluster's round; 0 in a cluster that is not the slowest.
        link_seconds: Price of a second of a transfer on each shared link, forward and backward.
    """

    channels: dict[str, float]
    round_seconds: tuple[float, ...]
    link_seconds: dict[LinkPosition, tuple[float, float]]


@dataclass(frozen=True)
class Allocation:
    """Plans with shares and powers, and their prediction; `prices` is `None` if no links share a channel."""

    plans: RoundPlan
    prediction: RoundPrediction
    prices: Prices | None


def solve_shares(
    links: SharedLinks,
    start: Point,
    free: Bools,
    *,
    time_limit_seconds: float | None = None,
) -> tuple[Point, Prices]:
    """Solves the convex problem around a point.

    If no power is free, the result is the optimum, and `start` only scales the numbers. With free powers this
    is one step towards the optimum, and the result is never worse than `start`.

    Args:
        free: Radio directions whose power is chosen together with the shares. (J)

    Raises:
        SolverFailedError: The solver did not reach an optimum.
    """
    radio = links.radio
    shape = _Shape(
        num_clusters=len(links.delay.constant),
        num_links=len(links.positions),
        num_rows=len(links.delay.row_constant),
        num_channels=len(links.totals),
        num_given=int((radio & ~free).sum()),
        num_free=int(free.sum()),
        num_wires=int((~radio).sum()),
        num_uploads=len(links.uploads.positions),
        capped=bool(np.isfinite([*links.most_nats, *links.uploads.most_nats]).any()),
    )
    order = np.concatenate([np.flatnonzero(radio & ~free), np.flatnonzero(free)])
    order = np.concatenate([order, np.flatnonzero(~radio)])
    with _LOCK:
        return _program(shape).solve(links, start, order, time_limit_seconds)


@dataclass(frozen=True)
class _Shape:
    num_clusters: int
    num_links: int
    num_rows: int
    num_channels: int
    num_given: int
    num_free: int
    num_wires: int
    num_uploads: int
    capped: bool


_LOCK = threading.Lock()
"""Only one thread may set the parameters of a program and solve it."""


class _Program:
    """The convex problem of one shape. It is built once, and its numbers are parameters.

    It minimises docs/scheduling.md (13) over the shares B and the transfer times t, so that the bits D of
    each direction fit: D <= r(B) t. Each variable is divided by its value at the start, so all are near 1.
    Directions come in three groups: radios with given powers, radios with free powers, and wires.

    With a free power, the energy e of a direction is a variable as well. Let y = B t. The least energy is

        e >= y (2^(D / y) - 1) / g

    which is an exponential cone. The constraint y <= B t is not convex. With y0, the value of y at the start,
    the program replaces it by

        (y / y0 + 1) / 2 <= sqrt(B t / y0)

    This constraint is convex. It is stricter than the old one, and equal to it at the start. The program treats
    e <= p t alike, where the powers p of a sender have a limit together. Repeated steps,
    each from the point found before, converge to a stationary point. That point is the optimum, because (13)
    is convex in the logarithms of shares and powers.

    For an upload, y is a variable of its own: the seconds in which it would need the whole channel. The uploads of a
    cluster take the sum of their y, so nothing has to be replaced; see docs/scheduling.md (6).

    Where the highest modulation limits a rate to mu B, y is at least D / mu.
    """

    def __init__(self, shape: _Shape) -> None:
        import cvxpy as cp

        self._shape = shape
        directions = 2 * shape.num_links
        self._parameters: dict[str, cp.Parameter] = {}
        self._times = cp.Variable(directions, nonneg=True)
        self._shares = cp.Variable(shape.num_links, nonneg=True)
        bottlenecks, slowest = cp.Variable(shape.num_clusters), cp.Variable()
        seconds = (
            self._given("constant", shape.num_clusters)
            + self._given("times", shape.num_clusters, directions) @ self._times
            + cp.multiply(self._given("repeats", shape.num_clusters), bottlenecks)
        )
        if shape.num_uploads:
            self._uploads = cp.Variable(shape.num_uploads)
            seconds += self._given("uploads", shape.num_clusters, shape.num_uploads) @ self._uploads
        self._slowest = slowest >= seconds
        self._channels = (
            self._given("channels", shape.num_channels, shape.num_links) @ self._shares <= 1
        )
        limits = [
            self._slowest,
            self._channels,
            bottlenecks >= self._given("least", shape.num_clusters),
        ]
        self._rows: cp.Constraint | None = None
        if shape.num_rows:
            self._rows = self._given(
                "row_cluster", shape.num_rows, shape.num_clusters
            ) @ bottlenecks >= (
                self._given("row_constant", shape.num_rows)
                + self._given("row_times", shape.num_rows, directions) @ self._times
            )
            limits.append(self._rows)
        cost = self._given("delay") * slowest
        shares = cp.Variable(directions)
        limits.append(shares == self._given("link_of", directions, shape.num_links) @ self._shares)
        wires = directions - shape.num_wires
        if shape.num_given:
            given = slice(0, shape.num_given)
            limits.append(self._given_radios(self._times[given], shares[given]))
            if shape.capped:
                least = self._given("given_least", shape.num_given)
                limits.append(shares[given] >= cp.multiply(least, cp.inv_pos(self._times[given])))
            cost = cost + self._given("given_joules", shape.num_given) @ self._times[given]
        if shape.num_free:
            free = slice(shape.num_given, wires)
            energy = cp.Variable(shape.num_free, nonneg=True)
            limits += self._free_radios(self._times[free], shares[free], energy)
            cost = cost + self._given("free_joules", shape.num_free) @ energy
        if shape.num_wires:
            limits += self._wires(self._times[wires:], shares[wires:])
        if shape.num_uploads:
            energy = cp.Variable(shape.num_uploads, nonneg=True)
            limit = self._given("upload_limit", shape.num_uploads, shape.num_uploads)
            limits += self._least_energy("upload", self._uploads, energy)
            limits.append(energy <= limit @ self._uploads)
            cost = cost + self._given("upload_joules", shape.num_uploads) @ energy
        self._problem = cp.Problem(cp.Minimize(cost), limits)

    def _given(self, name: str, *sizes: int) -> "cp.Parameter":
        import cvxpy as cp

        self._parameters[name] = cp.Parameter(sizes, nonneg=True)
        return self._parameters[name]

    def _given_radios(self, times: "cp.Expression", shares: "cp.Expression") -> "cp.Constraint":
        """Returns the rate of docs/scheduling.md (1) as a constraint: -rel_entr(B, B + A) >= D / t.

        Signals may be 60 dB above the noise. So B + A is divided by 1 + A, and a term linear in B corrects
        for that.
        """
        import cvxpy as cp

        count = self._shape.num_given
        received = cp.multiply(self._given("per_hertz", count), shares) + self._given(
            "signal", count
        )
        rate = cp.multiply(self._given("log_signal", count), shares) - cp.rel_entr(shares, received)
        return rate >= cp.multiply(self._given("demand", count), cp.inv_pos(times))

    def _free_radios(
        self, times: "cp.Expression", shares: "cp.Expression", energy: "cp.Variable"
    ) -> "list[cp.Constraint]":
        """Returns the least energy for y, the bound on y, and the limit of the powers; `product` is y."""
        import cvxpy as cp

        count = self._shape.num_free
        product, caps = cp.Variable(count), cp.Variable(count, nonneg=True)
        return [
            *self._least_energy("free", product, energy),
            cp.SOC(times + shares, cp.vstack([product + 1, times - shares])),
            cp.SOC(times + caps, cp.vstack([energy + 1, times - caps])),
            self._given("senders", count, count) @ caps <= 1,
        ]

    def _least_energy(
        self, name: str, product: "cp.Variable", energy: "cp.Variable"
    ) -> "list[cp.Constraint]":
        import cvxpy as cp

        count = product.size
        received = cp.multiply(self._given(f"{name}_per_product", count), product) + cp.multiply(
            self._given(f"{name}_per_energy", count), energy
        )
        logs = cp.multiply(self._given(f"{name}_log_start", count), 1 - product)
        limits: list[cp.Constraint] = [cp.ExpCone(logs, product, received)]
        if self._shape.capped:
            limits.append(product >= self._given(f"{name}_least", count))
        return limits

    def _wires(self, times: "cp.Expression", shares: "cp.Expression") -> "list[cp.Constraint]":
        import cvxpy as cp

        count = self._shape.num_wires
        return [
            shares >= cp.multiply(self._given("wire_demand", count), cp.inv_pos(times)),
            times >= self._given("least_wire_times", count),
        ]

    def _run(self, time_limit_seconds: float | None) -> None:
        import cvxpy as cp

        limit = {} if time_limit_seconds is None else {"time_limit": time_limit_seconds}
        outcome = ""
        for tolerance in _TOLERANCES[1:] if self._shape.num_free else _TOLERANCES:
            accuracy = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), tolerance)
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Solution may be inaccurate")
                    # With a warm start, the result would depend on the problems before.
                    self._problem.solve(solver=_SOLVER, warm_start=False, **accuracy, **limit)
            except cp.SolverError as error:
                outcome = str(error)
                continue
            if self._problem.status == cp.OPTIMAL:
                return
            outcome = f"its status is {self._problem.status!r}"
        raise SolverFailedError(
            f"{_SOLVER} found no optimum of the bandwidth problem of {self._shape}: {outcome}. Every finite channel has "
            "an optimum, so the solver needs more time, or some number of the problem is extreme"
        )

    def solve(
        self,
        links: SharedLinks,
        start: Point,
        order: npt.NDArray[np.intp],
        time_limit_seconds: float | None,
    ) -> tuple[Point, Prices]:
        """Solves the problem for these links, with the directions in this order; see `solve_shares`."""
        delay, shape = links.delay, self._shape
        count = shape.num_links
        given, free, wires = np.split(order, [shape.num_given, 2 * count - shape.num_wires])
        uploads = links.uploads
        seconds = float(links.round_seconds(start).max())
        bottlenecks = delay.bottlenecks(start.times)
        # A bottleneck of 0 has no price. It gets the price 1, so that the solver keeps it at 0.
        none = bottlenecks == 0
        bottlenecks[none] = 1.0
        row_scale = bottlenecks[delay.row_cluster]
        both = np.concatenate([start.shares, start.shares])
        signal = start.watts * links.gain / both
        demand = links.bits / (both * start.times)
        joules = links.joule_price * start.watts * start.times
        upload_signal = start.upload_watts * uploads.gain / start.upload_shares
        upload_joules = start.upload_watts * start.upload_times
        whole_channel = start.upload_shares / uploads.hertz * start.upload_times
        same_cluster = uploads.cluster[:, None] == uploads.cluster
        upload_cost = uploads.joule_price * upload_joules
        unit = links.second_price * seconds + float(joules.sum() + upload_cost.sum())
        with np.errstate(divide="ignore", invalid="ignore"):
            values = {
                "constant": delay.constant / seconds,
                "times": (delay.times * start.times / seconds)[:, order],
                "repeats": np.where(none, 1.0, delay.repeats * bottlenecks / seconds),
                "least": delay.least / bottlenecks,
                "channels": np.eye(shape.num_channels)[links.channel].T
                * (start.shares / links.totals[links.channel]),
                "row_cluster": np.eye(shape.num_clusters)[delay.row_cluster],
                "row_constant": delay.row_constant / row_scale,
                "row_times": (delay.row_times * start.times / row_scale[:, None])[:, order],
                "delay": links.second_price * seconds / unit,
                "link_of": np.eye(count)[order % count],
                "given_joules": joules[given] / unit,
                "per_hertz": 1 / (1 + signal[given]),
                "signal": signal[given] / (1 + signal[given]),
                "log_signal": np.log1p(signal[given]),
                "demand": (demand * math.log(2) / links.efficiency)[given],
                "given_least": (demand * math.log(2) / links.efficiency / links.most_nats)[given],
                "free_joules": joules[free] / unit,
                "free_per_product": 1 / (1 + signal[free]),
                "free_per_energy": signal[free] / (1 + signal[free]),
                "free_log_start": np.log1p(signal[free]),
                "free_least": np.log1p(signal[free]) / links.most_nats[free],
                "senders": links.same_sender[np.ix_(free, free)]
                * (start.watts[free] / links.limit_watts[free, None]),
                "wire_demand": demand[wires],
                "least_wire_times": (links.bits / links.capacity_bps / start.times)[wires],
                "uploads": np.eye(shape.num_clusters)[uploads.cluster].T * whole_channel / seconds,
                "upload_limit": same_cluster
                * whole_channel
                * (uploads.limit_watts / upload_joules)[:, None],
                "upload_joules": upload_cost / unit,
                "upload_per_product": 1 / (1 + upload_signal),
                "upload_per_energy": upload_signal / (1 + upload_signal),
                "upload_log_start": np.log1p(upload_signal),
                "upload_least": np.log1p(upload_signal) / uploads.most_nats,
            }
        for name, parameter in self._parameters.items():
            parameter.value = values[name]
        self._run(time_limit_seconds)
        shares = np.maximum(np.asarray(self._shares.value), 1e-12) * start.shares
        used = np.bincount(links.channel, shares, minlength=len(links.totals)) / links.totals
        shares = shares / used[links.channel]
        watts = start.watts.copy()
        times = np.empty(2 * count)
        times[order] = np.asarray(self._times.value)
        watts[free] = links.least_watts(shares, times * start.times)[free]
        slowest = np.asarray(self._slowest.dual_value)
        second = (slowest / seconds) @ delay.times
        if self._rows is not None:
            second += (np.asarray(self._rows.dual_value) / row_scale) @ delay.row_times
        bandwidth = np.asarray(self._channels.dual_value) / links.totals
        prices = Prices(
            dict(zip(links.channel_names, (unit * bandwidth).tolist(), strict=True)),
            tuple((unit * slowest / seconds).tolist()),
            {
                key: (float(unit * second[i]), float(unit * second[count + i]))
                for i, key in enumerate(links.positions)
            },
        )
        upload_shares, upload_watts = start.upload_shares, start.upload_watts
        if shape.num_uploads:
            whole_channel = whole_channel * np.maximum(np.asarray(self._uploads.value), 1e-12)
            together = (same_cluster @ whole_channel).astype(np.float64)
            upload_shares = whole_channel / together * uploads.hertz
            upload_watts = uploads.least_watts(upload_shares, together)
        return links.point(shares, watts, upload_shares, upload_watts), prices


@lru_cache(maxsize=64)
def _program(shape: _Shape) -> _Program:
    return _Program(shape)
