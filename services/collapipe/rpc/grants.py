"""Grants: what the scheduler allows in one attempt. It signs them, and every host checks them before it acts.

A certificate says who a host is, and the plan of a grant says what it may do.
"""

import hashlib

import grpc
from google.protobuf.message import DecodeError

from collapipe.certificates.identity import Role
from collapipe.errors import NotPermittedError
from collapipe.rpc.credentials import Security
from collapipe.rpc.permissions import check_is_caller
from collapipe.v1 import control_unit_pb2, edge_server_pb2, plan_pb2, stage_pb2


def grant_of(request: control_unit_pb2.RunRoundRequest, host_cluster: int) -> plan_pb2.Grant:
    """Returns the grant that lets a control unit do what a request asks for.

    Args:
        host_cluster: The cluster of the deployment that runs the plan.
    """
    return plan_pb2.Grant(
        attempt=request.attempt,
        plan=request.plan,
        host_cluster=host_cluster,
        edge_host_id=request.edge_host_id,
        model_sha256=_model_sha256(request.model),
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
) -> None:
    """Refuses a session that the scheduler has not granted to the caller and to this host. Plain text has no names to check.

    Raises:
        NotPermittedError: The grant is not the scheduler's, is for something else, or for other hosts.
    """
    if security.is_insecure:
        return
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
        NotPermittedError: The grant is not the scheduler's, is for something else, or for other hosts.
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
    """Returns what the scheduler has granted; raises `NotPermittedError` if it has not signed it, or if it is malformed."""
    security.check_signature(signed.grant, signed.signature, signed.certificate, Role.SCHEDULER)
    try:
        return plan_pb2.Grant.FromString(signed.grant)
    except DecodeError:
        raise NotPermittedError(
            "the grant of an attempt is malformed: run the same version of CollaPipe on all machines"
        ) from None
