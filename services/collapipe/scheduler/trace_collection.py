"""Collects the spans of a round from its hosts, and measures how far their clocks are ahead."""

import time
from collections.abc import Iterable, Iterator, Sequence

from collapipe.errors import CollapipeError, NotFoundError, PeerLostError
from collapipe.rpc import ChannelPool, call, impossible_value, within_silence
from collapipe.scheduler.host_registry import EDGE_SERVER
from collapipe.telemetry.clock_offset import ClockOffset, RoundTrip, estimate_offset
from collapipe.trace_service import recorded_spans
from collapipe.v1 import plan_pb2, scheduler_pb2, trace_pb2, trace_pb2_grpc

SCHEDULER = "scheduler"
"""The host id of the scheduler's own spans."""

_ROUND_TRIPS = 8
"""The first round trip also opens the connection, so only the shortest one counts."""
_DEADLINE_SECONDS = 5.0
_SILENCE_SECONDS = 10.0
_MOST_SPANS = 1 << 17
"""Twice as many as a host keeps. Otherwise its answer could go on for ever."""

Message = scheduler_pb2.GetTraceResponse


def collect_trace(
    attempt: plan_pb2.Attempt,
    plans: Iterable[plan_pb2.Plan],
    hosts: Sequence[scheduler_pb2.HostStatus],
    channels: ChannelPool,
) -> Iterator[Message]:
    """Yields the spans of the scheduler, of the stages of the plans and of the edge server.

    A host without spans, or that cannot be reached, gets a message that says so.

    Args:
        hosts: All hosts that have registered.
    """
    statuses = {status.host.host_id: status for status in hosts}
    host_ids = [stage.host_id for plan in plans for stage in plan.stages]
    host_ids += [host_id for host_id, s in statuses.items() if s.host.role == EDGE_SERVER]
    own = Message(host_id=SCHEDULER, unix_offset_seconds=time.time() - time.perf_counter())
    yield from _or_missing(own, _own_messages(attempt, own))
    for host_id in dict.fromkeys(host_ids):
        messages = _messages_of_host(attempt, host_id, statuses.get(host_id), channels)
        yield from _or_missing(Message(host_id=host_id), messages)


def _or_missing(message: Message, messages: Iterator[Message]) -> Iterator[Message]:
    """Yields messages. After an error, or without any spans, yields `message` with the reason."""
    num_messages = 0
    try:
        for each in messages:
            num_messages += 1
            yield each
    except CollapipeError as error:
        message.missing = str(error)
    else:
        if num_messages:
            return
        message.missing = (
            f"{message.host_id} has no spans of this round: it did nothing in it, or has restarted since, or has "
            "recorded too much since; trace a newer round"
        )
    yield message


def _own_messages(attempt: plan_pb2.Attempt, like: Message) -> Iterator[Message]:
    for spans in recorded_spans(attempt):
        yield Message(
            host_id=like.host_id, unix_offset_seconds=like.unix_offset_seconds, spans=spans
        )


def _messages_of_host(
    attempt: plan_pb2.Attempt,
    host_id: str,
    status: scheduler_pb2.HostStatus | None,
    channels: ChannelPool,
) -> Iterator[Message]:
    if status is None:
        raise NotFoundError(
            f"{host_id} has not registered since the scheduler started: start {host_id}, or trace a round in which it took no part"
        )
    if not status.alive:
        why = status.refusal or "it sends no heartbeats: start it again"
        raise PeerLostError(host_id, f"{host_id} is not asked: {why}")
    stub = trace_pb2_grpc.TraceServiceStub(channels.channel(status.host.address))
    round_trips = [_read_clock(stub, host_id) for _ in range(_ROUND_TRIPS)]
    offset, now = estimate_offset(round_trips), round_trips[-1].sent
    answers = within_silence(
        stub.GetSpans(trace_pb2.GetSpansRequest(attempt=attempt)),
        _SILENCE_SECONDS,
        host_id,
        lambda: "send its spans",
    )
    num_spans = 0
    for answer in answers:
        num_spans += len(answer.spans)
        _check(answer, host_id)
        if num_spans > _MOST_SPANS:
            raise PeerLostError(
                host_id,
                f"{host_id} sent {num_spans} spans, over the limit of {_MOST_SPANS}: look at its log",
            )
        if answer.spans:
            yield _message(host_id, answer.spans, offset, now)


def _message(
    host_id: str, spans: Sequence[trace_pb2.Span], offset: ClockOffset, now: float
) -> Message:
    oldest = min(span.started_seconds for span in spans)
    return Message(
        host_id=host_id,
        clock_offset_seconds=offset.seconds,
        clock_uncertainty_seconds=offset.uncertainty_after(now - oldest),
        spans=spans,
    )


def _read_clock(stub: trace_pb2_grpc.TraceServiceStub, host_id: str) -> RoundTrip:
    asked = time.perf_counter()
    answer = call(stub.ReadClock, trace_pb2.ReadClockRequest(), host_id, _DEADLINE_SECONDS)
    _check(answer, host_id)
    return RoundTrip(asked, answer.received_seconds, answer.sent_seconds, time.perf_counter())


def _check(answer: trace_pb2.ReadClockResponse | trace_pb2.GetSpansResponse, host_id: str) -> None:
    """Refuses an answer of a host with values that are impossible; raises `PeerLostError`."""
    if wrong := impossible_value(answer):
        raise PeerLostError(host_id, f"{host_id} sent {wrong}: look at its log")
