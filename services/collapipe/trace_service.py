"""Tells the scheduler what this host did in a round, and what its clock shows."""

import time
from collections.abc import Iterator
from itertools import islice

import grpc

from collapipe.telemetry.spans import SPANS, Span
from collapipe.v1 import plan_pb2, trace_pb2, trace_pb2_grpc

_SPANS_IN_A_MESSAGE = 100
"""A message then has about 7 kB. So on a slow link, signs of life of the running job do not wait for long."""


class TraceServicer(trace_pb2_grpc.TraceServiceServicer):
    """Serves the spans of this process."""

    def ReadClock(
        self, request: trace_pb2.ReadClockRequest, context: grpc.ServicerContext
    ) -> trace_pb2.ReadClockResponse:
        received = time.perf_counter()
        return trace_pb2.ReadClockResponse(
            received_seconds=received, sent_seconds=time.perf_counter()
        )

    def GetSpans(
        self, request: trace_pb2.GetSpansRequest, context: grpc.ServicerContext
    ) -> Iterator[trace_pb2.GetSpansResponse]:
        for spans in recorded_spans(request.attempt):
            yield trace_pb2.GetSpansResponse(spans=spans)


def recorded_spans(attempt: plan_pb2.Attempt) -> Iterator[list[trace_pb2.Span]]:
    """Yields the spans of this process in an attempt, in lists that fit into a message."""
    spans = SPANS.of_round(attempt.job_id, attempt.round_index, attempt.attempt)
    while messages := [_message(span) for span in islice(spans, _SPANS_IN_A_MESSAGE)]:
        yield messages


def _message(span: Span) -> trace_pb2.Span:
    return trace_pb2.Span(
        track=span.track,
        name=span.name,
        started_seconds=span.started,
        ended_seconds=span.ended,
        peer=span.peer,
        codec=span.codec,
        step=span.step if span.step >= 0 else None,
        micro_batch=span.micro_batch if span.micro_batch >= 0 else None,
        unit=span.unit if span.unit >= 0 else None,
        bytes=span.num_bytes,
    )
