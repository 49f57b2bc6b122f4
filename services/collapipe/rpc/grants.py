"""Grants: what the scheduler allows in one attempt. It signs them, and every host checks them before it acts.

A certificate says who a host is, and the plan of a grant says what it may do.
"""

import hashlib

import grpc
from google.protobuf.message import DecodeError

from collapipe.certificates.identity import Role
from collapipe.errors import NotPermittedError, WrongStateError
from collapipe.job import JobConfig
from collapipe.rpc.credentials import Security
from collapipe.rpc.permissions import check_is_caller
from collapipe.v1 import control_unit_pb2, edge_server_pb2, plan_pb2, stage_pb2

_REMEDY = "run the same version of CollaPipe on all machines, or revoke the key of the control unit if it does not keep to the plan"


def grant_of(
    request: control_unit_pb2.RunRoundRequest, job: JobConfig, number: int
) -> plan_pb2.Grant:
    """Returns the grant that lets a control unit do what a request asks for.

    Args:
        job: The job of the request, parsed.
        number: The number of the grant.
    """
    return plan_pb2.Grant(
        attempt=request.attempt,
        plan=request.plan,
        host_cluster=job.host_clusters[request.plan.cluster_index],
        edge_host_id=request.edge_host_id,
        model_sha256=_model_sha256(request.model),
        number=number,
        settings=session_settings(request, job),
        edge_address=request.edge_address,
        previous_addresses=[stage.address for stage in request.previous_stages],
    )


def session_settings(
    request: control_unit_pb2.RunRoundRequest, job: JobConfig
) -> plan_pb2.SessionSettings:
    """Returns the settings of the sessions that a request asks for. `job` is its job, parsed."""
    return plan_pb2.SessionSettings(
        training_json=job.training.model_dump_json(),
        seed=job.seed,
        step_index=request.base.step_index,
        total_steps=request.total_steps,
        silence_seconds=job.schedule.silence_seconds,
        max_length=job.task.max_length,
        is_use=request.is_use,
    )


def sign_grant(security: Security, grant: plan_pb2.Grant) -> plan_pb2.SignedGrant:
    """Signs a grant as the scheduler. In plain text, where nobody can check it, it has no signature."""
    signed = plan_pb2.SignedGrant(grant=grant.SerializeToString())
    if not security.is_insecure:
        signed.signature, signed.certificate = security.sign(signed.grant)
    return signed


def check_session(
    security: Security,
    context: grpc.ServicerContext,
    configure: stage_pb2.ConfigureStage,
    host_id: str,
) -> plan_pb2.Grant | None:
    """Refuses a session that the scheduler has not granted to the caller and to this host. Returns the grant.

    Plain text has no names to check, and the result is `None`.

    Raises:
        NotPermittedError: The grant is not the scheduler's, is too old, is for something else, or for other hosts.
        WrongStateError: This host has not registered since it started.
    """
    if security.is_insecure:
        return None
    grant = _granted(security, configure.grant)
    asked = configure.attempt, configure.plan, configure.host_cluster
    asked_model = _model_sha256(configure.model)
    if (*asked, asked_model) != (
        *(grant.attempt, grant.plan, grant.host_cluster),
        grant.model_sha256,
    ):
        raise NotPermittedError(
            f"a session of {_words(configure.attempt)} was asked for with the grant of {_words(grant.attempt)}: the attempt, the "
            "plan, the cluster and the model must be those that the scheduler has granted"
        )
    check_stage_caller(context, grant.plan, 0)
    stages = [stage.host_id for stage in grant.plan.stages]
    if stages[configure.stage_index : configure.stage_index + 1] != [host_id]:
        raise NotPermittedError(
            f"{host_id} was asked to run stage {configure.stage_index} of {_words(grant.attempt)}, but the plan has the stages "
            f"{', '.join(stages)}"
        )
    _check_settings(configure, grant)
    _check_sources(configure, grant)
    return grant


def _check_settings(configure: stage_pb2.ConfigureStage, grant: plan_pb2.Grant) -> None:
    for field in plan_pb2.SessionSettings.DESCRIPTOR.fields:
        asked, granted = (getattr(each.settings, field.name) for each in (configure, grant))
        if asked != granted:
            raise NotPermittedError(
                f"a session of {_words(grant.attempt)} was asked for with {field.name} = {asked!r}, but the scheduler has granted "
                f"{granted!r}: {_REMEDY}"
            )


def _check_sources(configure: stage_pb2.ConfigureStage, grant: plan_pb2.Grant) -> None:
    granted = {stage.address for stage in grant.plan.stages}
    granted |= {grant.edge_address, *grant.previous_addresses}
    for source in configure.sources:
        for address in (
            *source.weights_addresses,
            *source.optimizer_addresses,
            *source.frozen_addresses,
        ):
            if address not in granted:
                raise NotPermittedError(
                    f"a session of {_words(grant.attempt)} was asked for that fetches unit {source.unit_index} from {address!r}, but "
                    f"the scheduler has granted {', '.join(sorted(granted))}: {_REMEDY}"
                )


def check_finish(grant: plan_pb2.Grant, finish: stage_pb2.FinishRound) -> None:
    """Refuses the end of a round that pushes to another host than the edge server of its grant; raises `NotPermittedError`."""
    asked = finish.edge_host_id, finish.edge_address
    # A committed round has no address, because it pushes nothing.
    if asked not in ((grant.edge_host_id, grant.edge_address), (grant.edge_host_id, "")):
        raise NotPermittedError(
            f"a stage was asked to push units of {_words(grant.attempt)} to {asked[0]!r} at {asked[1]!r}, but the scheduler has "
            f"granted {grant.edge_host_id} at {grant.edge_address}: {_REMEDY}"
        )


def check_stage_caller(
    context: grpc.ServicerContext, plan: plan_pb2.Plan, stage_index: int
) -> None:
    """Refuses a caller that does not run a stage; raises `NotPermittedError`. Plain text has no names to check."""
    if not 0 <= stage_index < len(plan.stages):
        raise NotPermittedError(
            f"a plan with {len(plan.stages)} stages has no stage {stage_index} that could make this call"
        )
    check_is_caller(context, plan.stages[stage_index].host_id)


def check_push(
    security: Security,
    context: grpc.ServicerContext,
    unit: edge_server_pb2.PushedUnit,
    host_id: str,
) -> None:
    """Refuses a push that the scheduler has not granted to the caller and to this host. Plain text has no names to check.

    Raises:
        NotPermittedError: The grant is not the scheduler's, is too old, is for something else, or for other hosts.
        WrongStateError: This host has not registered since it started.
    """
    if security.is_insecure:
        return
    grant = _granted(security, unit.grant)
    asked = unit.attempt, unit.cluster_index, host_id
    if asked != (grant.attempt, grant.plan.cluster_index, grant.edge_host_id):
        raise NotPermittedError(
            f"cluster {unit.cluster_index} pushed a unit of {_words(unit.attempt)} to {host_id} with the grant of cluster "
            f"{grant.plan.cluster_index} for {_words(grant.attempt)} and {grant.edge_host_id}: both must be the same"
        )
    for index, stage in enumerate(grant.plan.stages):
        if stage.start_unit <= unit.unit_index < stage.stop_unit:
            check_stage_caller(context, grant.plan, index)
            return
    raise NotPermittedError(f"the plan of {_words(grant.attempt)} has no unit {unit.unit_index}")


def _model_sha256(model: plan_pb2.ModelSpec) -> bytes:
    return hashlib.sha256(model.SerializeToString(deterministic=True)).digest()


def _words(attempt: plan_pb2.Attempt) -> str:
    return f"job {attempt.job_id}, round {attempt.round_index}, attempt {attempt.attempt}"


def _granted(security: Security, signed: plan_pb2.SignedGrant) -> plan_pb2.Grant:
    """Returns what the scheduler has granted.

    Raises:
        NotPermittedError: It has not signed it, or the grant is malformed or too old.
        WrongStateError: This host has not registered yet.
    """
    security.check_signature(signed.grant, signed.signature, signed.certificate, Role.SCHEDULER)
    try:
        grant = plan_pb2.Grant.FromString(signed.grant)
    except DecodeError:
        raise NotPermittedError(
            "the grant of an attempt is malformed: run the same version of CollaPipe on all machines"
        ) from None
    least = security.least_grant
    if least is None:  # After a restart, an old grant could be anybody's.
        raise WrongStateError(
            f"the grant of {_words(grant.attempt)} does not count here, because this host has not registered since it started: begin "
            "another attempt when it has"
        )
    if grant.number < least:
        raise NotPermittedError(
            f"the grant of {_words(grant.attempt)} has the number {grant.number}, but here grants count from {least} on: "
            "it is of an attempt that is over, so begin another"
        )
    return grant
