"""A state machine as a table of its cases."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

P = TypeVar("P")


@dataclass(frozen=True)
class Transition(Generic[P]):
    """What an event does in a phase.

    Args:
        decide: Takes the state, the event and the time. Returns the new state, and what is to be done.
        to: The phases that may follow.
    """

    decide: Callable[[Any, Any, float], Any]
    to: frozenset[P]


def transitions(
    cases: Iterable[tuple[P, type, Callable[[Any, Any, float], Any], Iterable[P]]],
) -> Mapping[tuple[P, type], Transition[P]]:
    """Returns the cases by phase and event. Each has a phase, a type of events, what decides, and the phases that may follow."""
    return {(phase, event): Transition(decide, frozenset(to)) for phase, event, decide, to in cases}
