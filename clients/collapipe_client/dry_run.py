"""`collapipe train --dry-run`: whether a job would work, and how long it would take. No host starts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from collapipe.byte_sizes import say_bytes
from collapipe.emulation.boxes import Box
from collapipe.emulation.device_profiles import device_profile
from collapipe.emulation.emulation_file import Emulation
from collapipe.job import JobConfig
from collapipe_client.estimate_command import ask, say_details, say_missing, say_notes
from collapipe_client.quantities import say_duration
from collapipe_client.reporting import print_json, say
from collapipe_client.testbed_processes import Device, device_name
from collapipe_client.workspace import free_disk_bytes


@dataclass(frozen=True)
class Site:
    """Where a job would run.

    Args:
        clusters: The devices of each cluster of the job.
        is_here: Whether the hosts are processes of this machine.
        num_new: How many processes would have to start.
        folder: The workspace on this machine, which keeps the state of all services. `None` if they run elsewhere.
        notes: What the estimate leaves out.
    """

    clusters: Sequence[Sequence[Box]]
    is_here: bool
    num_new: int = 0
    folder: Path | None = None
    notes: tuple[str, ...] = ()


def site_here(
    job: JobConfig,
    clusters: Sequence[Sequence[Device]],
    emulation: Emulation | None,
    folder: Path,
    *,
    is_up: bool,
) -> Site:
    """Describes a local testbed.

    Args:
        clusters: Those of the testbed.
        folder: Its workspace.
        is_up: Whether its processes run already.
    """
    emulation = emulation or Emulation()
    free = psutil.virtual_memory().available

    def box(cluster: int, number: int, device: Device) -> Box:
        memory = device.memory_bytes or None
        emulated = emulation.devices.get(device_name(cluster, number))
        if emulated is None:
            return Box(profile="laptop", memory_bytes=memory or free)
        slowdown = emulated.slowdown * emulation.time_scale
        flops = device_profile(emulated.profile).flops_per_second / slowdown
        return Box(profile=emulated.profile, memory_bytes=memory, flops_per_second=flops)

    boxes = [
        [box(cluster, number, device) for number, device in enumerate(clusters[cluster])]
        for cluster in job.host_clusters
    ]
    num_new = 0 if is_up else 2 + sum(1 + len(cluster) for cluster in clusters)
    links = ("the emulated links are left out",) if emulation.links or emulation.radios else ()
    return Site(_used(job, boxes), is_here=True, num_new=num_new, folder=folder, notes=links)


def site_elsewhere(job: JobConfig, memory: dict[int, list[int]]) -> Site:
    """Describes a deployment.

    Args:
        memory: The memory of the devices of each cluster, in bytes. 0 means no limit.
    """
    boxes = [
        [Box(profile="laptop", memory_bytes=limit or None) for limit in memory[cluster]]
        for cluster in job.host_clusters
    ]
    note = "the times are those of laptops with fast links, because nothing is measured yet: `collapipe plan explain` has better ones after a round"
    return Site(_used(job, boxes), is_here=False, notes=(note,))


def _used(job: JobConfig, clusters: list[list[Box]]) -> list[list[Box]]:
    return [cluster[: job.num_devices(index)] for index, cluster in enumerate(clusters)]


def dry_run(job: JobConfig, site: Site, command: str, as_json: bool, num_rounds: int) -> bool:
    """Estimates a job, and prints the result. Returns whether it would run.

    Args:
        command: What starts the job.
        num_rounds: Those that would run.

    Raises:
        InvalidInputError: The data or the model cannot be used.
    """
    # Hosts of one machine share its cores.
    num_devices = sum(map(len, site.clusters))
    share = min(1.0, len(os.sched_getaffinity(0)) / num_devices) if site.is_here else None
    document = job.model_dump(mode="json", exclude_unset=True) | {"devices_per_cluster": None}
    answers: dict[tuple[Box, ...], dict[str, Any]] = {}
    for cluster in map(tuple, site.clusters):
        if cluster not in answers:
            boxes = [box.model_dump(mode="json") for box in cluster]
            answers[cluster] = ask({"job": document, "devices": boxes, "core_share": share})
    estimates = [answers[tuple(cluster)]["clusters"][0] for cluster in site.clusters]
    needed = _memory_of_all(estimates, site.num_new)
    free = psutil.virtual_memory().available if site.is_here else None
    has_room = free is None or needed <= free
    disk_needed = _disk_of_all(job, estimates, num_rounds)
    free_disk = None if site.folder is None else free_disk_bytes(site.folder)
    has_disk = free_disk is None or disk_needed <= free_disk
    fits = all(answer["fits"] for answer in answers.values()) and has_room and has_disk
    round_seconds = max(each["round_seconds"] for each in estimates)
    first = max(each["first_fetch_seconds"] for each in estimates)
    job_seconds = first + num_rounds * round_seconds
    if as_json:
        print_json(
            {
                "event": "dry_run",
                "fits": fits,
                "num_rounds": num_rounds,
                "round_seconds": round_seconds,
                "job_seconds": job_seconds,
                "memory_bytes": needed,
                "free_bytes": free,
                "disk_bytes": disk_needed,
                "free_disk_bytes": free_disk,
                "estimates": list(answers.values()),
                "notes": list(site.notes),
                "command": command,
            }
        )
        return fits
    parts = {}
    for cluster in answers:
        listed = [str(i) for i, each in enumerate(site.clusters) if tuple(each) == cluster]
        parts[cluster] = f" in cluster {', '.join(listed)}" * (len(answers) > 1)
    memory = ""
    if free is not None:
        who = (
            "all processes together need" if site.num_new else "the processes that run need another"
        )
        memory = f"{who} {say_bytes(needed)} or so, and {say_bytes(free)} of this machine are free"
    for cluster, answer in answers.items():
        if not answer["fits"]:
            say_missing(answer, parts[cluster])
    if not has_room:
        say(f"it does not fit: {memory}: use fewer devices, or a smaller model")
    disk = ""
    if free_disk is not None:
        disk = f"the state of all services needs up to {say_bytes(disk_needed)} of the disk of {site.folder}, and {say_bytes(free_disk)} are free"
    if not has_disk:
        say(
            f"it does not fit: {disk}: make room, use a --workspace DIR on another disk, or lower training.keep_commits or "
            "training.replicate_every"
        )
    if fits:
        say("it fits")
    for cluster, answer in answers.items():
        if parts[cluster]:
            say(f"the plan{parts[cluster]}:")
        say_details(answer | {"fits": fits, "clusters": answer["clusters"][:1]})
    say_notes(answers[tuple(site.clusters[0])])
    for note in site.notes:
        say(f"note: {note}")
    if not fits:
        say("nothing was started")
        return False
    total = job.training.rounds
    rounds = (
        f"{num_rounds} of {total} rounds that would run"
        if num_rounds < total
        else f"{total} rounds"
    )
    say(
        f"a round takes about {_about(round_seconds)}, and the {rounds} about {_about(job_seconds)}, without the preparation "
        "and the evaluations"
        if num_rounds
        else f"all {total} rounds are committed, so none would run: raise training.rounds to train more"
    )
    for line in filter(None, (memory, disk)):
        say(line)
    say(f"nothing was started. Train with:\n  {command}")
    return True


def _about(seconds: float) -> str:
    """Writes a duration, with two digits below 10 s, so that many short rounds add up."""
    return f"{seconds:.2g} s" if seconds < 10 else say_duration(seconds)


def _memory_of_all(estimates: Sequence[dict[str, Any]], num_new: int) -> float:
    """Returns the memory that training takes on all hosts, and that of processes that would have to start, in bytes."""
    *_, edge_server = estimates[0][
        "hosts"
    ]  # It is the last host of each cluster, with the heads of all.
    others = [host for each in estimates for host in each["hosts"][:-1]]
    training = sum(host["needed_bytes"] for host in (*others, edge_server))
    return float(training + num_new * edge_server["process_bytes"])


def _disk_of_all(job: JobConfig, estimates: Sequence[dict[str, Any]], num_rounds: int) -> int:
    """Returns the bytes that the state of all services takes on one disk at most, as docs/operations.md says."""
    hosts = estimates[0]["hosts"]
    weights: float = sum(host["weights_bytes"] for host in hosts)
    frozen: float = sum(host["frozen_bytes"] for host in hosts)
    training, clusters = job.training, job.clusters
    most = training.keep_commits + 2
    if clusters > 1:
        most = max(most, 2 * training.replicate_every)
    commits = min(num_rounds + 1, most)
    # A round has a copy for each cluster, and one for the averages.
    edge_server = (commits + clusters + 1) * weights + frozen
    moments = 2 if training.optimizer == "adamw" else int(training.momentum > 0)
    # The control unit and the devices of a cluster keep frozen weights; it also has the moments of two commits.
    return round(edge_server + clusters * (2 * moments * weights + frozen))
