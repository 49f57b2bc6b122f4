"""Copies weights and optimizer state from the devices to the control unit, once in every round.

A device keeps its units in memory only. If it is lost, the next attempt starts from the copies of the last commit.
So each commit needs the optimizer's moments as well as the weights, and a lost device costs at most one round.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from collapipe.rpc import ChannelPool
from collapipe.v1 import job_pb2, plan_pb2
from collapipe.weights.blob_store import BlobStore
from collapipe.weights.transfer import store_blob


def gather_weights_and_moments(
    states: Sequence[plan_pb2.UnitState],
    devices: Sequence[plan_pb2.Stage],
    channels: ChannelPool,
    store: BlobStore,
) -> list[job_pb2.GatheredState]:
    """Stores the state of every unit that the devices hold.

    Args:
        states: The states of all units of the model, in order.
        devices: The stages to copy from.

    Returns:
        The bytes and seconds of each device that sent a blob. A blob that is already in the store is not sent
        again.
    """
    started = time.perf_counter()

    def gather_from(device: plan_pb2.Stage) -> job_pb2.GatheredState:
        fetched_bytes = 0
        for state in states[device.start_unit : device.stop_unit]:
            for digest in (state.weights_digest, state.optimizer_digest):
                if digest and digest not in store:
                    store_blob(store, channels, digest, device.address)
                    fetched_bytes += store.total_bytes(digest)
        seconds = time.perf_counter() - started
        return job_pb2.GatheredState(host_id=device.host_id, bytes=fetched_bytes, seconds=seconds)

    if not devices:
        return []
    with ThreadPoolExecutor(len(devices), "gather") as executor:
        return [gathered for gathered in executor.map(gather_from, devices) if gathered.bytes]
