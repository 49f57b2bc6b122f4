"""Tells each stage of a plan which units it holds, in which state, and where it can fetch them."""

import hmac
from collections.abc import Sequence

from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.rpc import session_settings
from collapipe.v1 import control_unit_pb2, stage_pb2


def check_round(request: control_unit_pb2.RunRoundRequest, job: JobConfig) -> None:
    """Refuses a round whose plan does not fit the job and the model; raises `InvalidInputError`. Each stage checks its own part."""
    plan, num_units = request.plan, len(request.base.units)
    job.check_cluster(plan.cluster_index)
    last = max((each.stop_unit for each in (*plan.stages, *request.previous_stages)), default=0)
    if not plan.stages or not plan.num_micro_batches:
        wrong = f"has {len(plan.stages)} stages and {plan.num_micro_batches} micro-batches"
    elif last > num_units:
        wrong = f"or the one before ends at unit {last}, but the model has {num_units} units"
    else:
        return
    raise InvalidInputError(
        f"the plan of round {request.attempt.round_index} {wrong}: run the same version of CollaPipe on all machines"
    )


def stage_configuration(
    request: control_unit_pb2.RunRoundRequest,
    job: JobConfig,
    stage_index: int,
    own_address: str,
    noise_secret: bytes = b"",
) -> stage_pb2.ConfigureStage:
    """Returns the first command to one stage of the plan.

    Args:
        own_address: Address of the control unit, which has the optimizer states of the restore point.
        noise_secret: The secret of the job and cluster for the noise of private updates.
    """
    stage = request.plan.stages[stage_index]
    units = range(stage.start_unit, stage.stop_unit)
    previous_owners = {
        unit: owner.address
        for owner in request.previous_stages
        for unit in range(owner.start_unit, owner.stop_unit)
    }
    return stage_pb2.ConfigureStage(
        attempt=request.attempt,
        plan=request.plan,
        stage_index=stage_index,
        model=request.model,
        settings=session_settings(request, job),
        units=[request.base.units[unit] for unit in units],
        sources=[
            stage_pb2.UnitSource(
                unit_index=unit,
                weights_addresses=_other_hosts(
                    # Only the edge server has the average of several clusters.
                    [
                        previous_owners.get(unit) if job.clusters == 1 else None,
                        request.edge_address,
                    ],
                    stage.address,
                ),
                optimizer_addresses=_other_hosts(
                    [previous_owners.get(unit), own_address, request.edge_address], stage.address
                ),
                frozen_addresses=_other_hosts(
                    [previous_owners.get(unit), request.edge_address], stage.address
                ),
            )
            for unit in units
        ],
        host_cluster=job.host_clusters[request.plan.cluster_index],
        grant=request.grant,
        is_hidden=job.averaging.secure,
        is_masked=request.HasField("masked"),
        kept_optimizer_digests=_kept_optimizer_digests(
            request, job, is_edge_server=stage.address == request.edge_address
        ),
        privacy=_privacy(request, job, units, noise_secret)
        if job.privacy.is_on and request.local_steps
        else None,
    )


def _privacy(
    request: control_unit_pb2.RunRoundRequest,
    job: JobConfig,
    units: Sequence[int],
    noise_secret: bytes,
) -> stage_pb2.UpdatePrivacy:
    """Returns how a stage makes its updates private. It learns the secrets of its own units in this round only."""
    return stage_pb2.UpdatePrivacy(
        clip_norm=job.privacy.clip_norm,
        noise_stddev=job.noise_stddev,
        secrets=[
            hmac.digest(noise_secret, f"{request.attempt.round_index}/{unit}".encode(), "sha256")
            for unit in units
        ],
    )


def _kept_optimizer_digests(
    request: control_unit_pb2.RunRoundRequest, job: JobConfig, *, is_edge_server: bool
) -> list[str]:
    """Returns the optimizer states that a host keeps although its units train on."""
    # The edge server has stored its own of the candidate at the commit.
    units = [] if is_edge_server else list(request.candidate.units)
    if job.may_leave_out_clusters:
        # If the cluster is late, it begins its next round with these states, too.
        units += request.base.units
    return list(dict.fromkeys(unit.optimizer_digest for unit in units if unit.optimizer_digest))


def _other_hosts(addresses: Sequence[str | None], own_address: str) -> list[str]:
    """Returns addresses in order, without missing ones, repeated ones and the host's own."""
    return [address for address in dict.fromkeys(addresses) if address and address != own_address]
