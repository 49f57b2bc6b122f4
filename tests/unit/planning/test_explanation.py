"""The explanation of a round: a sum that adds up, and advice that the estimator confirms."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collapipe.allocation import (
    ClusterProblem,
    Host,
    ModelCost,
    RoundPrediction,
    RoundProblem,
    WiredLink,
    decide_round,
    predict,
)
from collapipe.planning.advice import advise
from collapipe.planning.decisions import Question, RoundDecision, decide
from collapipe.planning.explanation import explain
from collapipe.v1.job_pb2 import RoundSummary
from collapipe.v1.scheduler_pb2 import RoundCommitted

_SECONDS = st.floats(0.0, 50.0)


def decided(
    strategy: str = "pipeline",
    milliseconds: Sequence[float] = (10.0, 10.0, 10.0),
    mbit: float = 1000.0,
    **more: object,
) -> RoundDecision:
    """Decides a round of one cluster with six blocks, five steps and mini-batches of 16 rows.

    Args:
        milliseconds: Time of a block for a row, by device.
        mbit: Rate of every link, in Mbit/s.
    """
    ends = (Host("control-unit", 0.001), Host("edge-server", 0.001))
    devices = tuple(
        Host(f"device-{k}", each / 1e3, push_bps=4e6 * mbit, fetch_bps=4e6 * mbit)
        for k, each in enumerate(milliseconds)
    )
    ids = [host.host_id for host in (*ends, *devices)]
    cluster = ClusterProblem(
        ends[0],
        devices,
        ends[1],
        {pair: WiredLink(1e6 * mbit, 0.001) for pair in itertools.permutations(ids, 2)},
        micro_batch_options=(4,),
        step_seconds=0.01,
    )
    model = ModelCost(6, 4e6, 1e5, 1e5, 1.0, 1.0, head_state_bytes=4e6)
    problem = RoundProblem((cluster,), model, mini_batch=16, local_steps=5, fixed_seconds=0.1)
    return decide(Question(strategy, (), 0.0, replace(problem, **more)))


DECISION = decided()


def numbers(lines: Sequence[str], column: int) -> list[tuple[int, float]]:
    """Returns the indentation and the seconds of each row of the table."""
    rows = [re.fullmatch(r"( *)(\S.*?) +(-|-?[\d.]+ s) +(-|-?[\d.]+ s)", line) for line in lines]
    told = [(len(row[1]), row[3 + column]) for row in rows if row is not None]
    return [(indent, float(text[:-2])) for indent, text in told if text != "-"]


def decimals(lines: Sequence[str]) -> int:
    """Returns the number of decimals in the table."""
    [row] = [line for line in lines if line.startswith("  whole round")]
    return len(re.findall(r"\.(\d+) s", row)[0])


def assert_adds_up(told: list[tuple[int, float]], digits: int) -> None:
    step = 10.0**-digits
    *parts, (_, whole) = told
    upper = [seconds for indent, seconds in parts if indent == 2]
    lower = [seconds for indent, seconds in parts if indent == 4]
    assert whole == pytest.approx(sum(upper), abs=step * len(told))
    training = upper[1 if len(upper) == 4 else 2]
    assert training == pytest.approx(sum(lower), abs=step * len(told))
    assert all(seconds >= 0 for seconds in lower)


@settings(max_examples=5)
@given(st.lists(st.floats(0.1, 200.0), min_size=1, max_size=4), st.floats(0.5, 1e4), st.booleans())
def test_predicted_seconds_add_up(times: list[float], mbit: float, serial: bool) -> None:
    decision = decided(milliseconds=times, mbit=mbit, update_per_micro_batch=serial)
    told = numbers(explain(decision), 0)
    assert len(told) == 9
    digits = decimals(explain(decision))
    assert_adds_up(told, digits)
    whole = decision.prediction.full_round_seconds
    assert told[-1][1] == pytest.approx(whole, abs=10.0**-digits)


@settings(max_examples=15)
@given(
    st.tuples(_SECONDS, _SECONDS, _SECONDS, st.floats(0.1, 50.0)),
    st.lists(st.tuples(_SECONDS, _SECONDS, _SECONDS), min_size=5, max_size=5),
    _SECONDS,
)
def test_measured_seconds_add_up(
    phases: tuple[float, ...], stages: list[tuple[float, ...]], rest: float
) -> None:
    decision = DECISION
    configure, training, gather, evaluation = phases
    summary = RoundSummary(
        configure_seconds=configure,
        training_seconds=training,
        gather_seconds=gather,
        evaluation_seconds=evaluation,
        local_steps=5,
    )
    for stage, (forward, backward, waiting) in zip(decision.plans[0].stages, stages, strict=True):
        report = summary.stages.add(host_id=stage.host_id)
        report.times.forward_seconds = forward
        report.times.backward_seconds = backward
        report.times.waiting_seconds = waiting
        report.times.total_seconds = 1.1 * (forward + backward + waiting)
    whole = sum(phases) + rest + decision.solve_seconds
    lines = explain(decision, RoundCommitted(round_seconds=whole, summaries=[summary]))
    told = numbers(lines, 1)
    assert len(told) == 11 - (evaluation == 0)
    digits = decimals(lines)
    assert_adds_up(told, digits)
    assert told[-1][1] == pytest.approx(whole, abs=10.0**-digits)
    [difference] = [line for line in lines if "than predicted" in line]
    assert ("; no prediction counts the " in difference) == (evaluation > 0)
    assert all(len(line) <= 80 for line in lines if line.endswith(" s"))


def lasting(prediction: RoundPrediction) -> float:
    """Returns the time of a round without the initial transfer of weights, which counts over ten rounds."""
    return prediction.round_seconds - prediction.clusters[0].migrate_seconds / 10


def saved(decision: RoundDecision, words: str) -> float:
    [one] = [each for each in advise(decision) if words in each.text]
    return one.saved_seconds


def changed_cluster(decision: RoundDecision, **changes: object) -> RoundProblem:
    problem, [cluster] = decision.question.problem, decision.question.problem.clusters
    return replace(problem, clusters=(replace(cluster, **changes),))  # type: ignore[arg-type]


def test_advice_about_a_link_equals_the_prediction_with_that_rate() -> None:
    decision = decided(mbit=10.0)
    pattern = r"a better link of (device-\d): (\d+) Mbit/s instead of 10 Mbit/s"
    found = [(one, re.fullmatch(pattern, one.text)) for one in advise(decision)]
    best, match = next((one, match) for one, match in found if match)
    host_id, factor = match[1], float(match[2]) / 10.0
    assert best.links == {("rate", host_id)}
    [cluster] = decision.question.problem.clusters
    links = {
        pair: WiredLink(1e7 * factor, 0.001) if host_id in pair else link
        for pair, link in cluster.links.items()
    }
    devices = tuple(
        replace(d, push_bps=factor * d.push_bps, fetch_bps=factor * d.fetch_bps)
        if d.host_id == host_id
        else d
        for d in cluster.devices
    )
    better = predict(changed_cluster(decision, links=links, devices=devices), decision.plans)
    expected = lasting(decision.prediction) - lasting(better)
    assert best.saved_seconds == pytest.approx(expected)


def test_advice_about_int8_equals_the_prediction_with_int8() -> None:
    decision = decided(mbit=10.0)
    [plan] = decision.plans
    links = tuple(replace(link, codec="int8") for link in plan.links)
    changed = predict(decision.question.problem, (replace(plan, links=links),))
    expected = lasting(decision.prediction) - lasting(changed)
    assert saved(decision, "int8 on the links") == pytest.approx(expected)


def test_advice_about_a_device_equals_the_prediction_with_that_speed() -> None:
    decision = decided("pipeline", (10.0, 10.0, 40.0))
    *first, slow = decision.question.problem.clusters[0].devices
    devices = (*first, replace(slow, seconds_per_sample=0.01))
    changed = predict(changed_cluster(decision, devices=devices), decision.plans)
    expected = lasting(decision.prediction) - lasting(changed)
    assert saved(decision, "in place of device-2") == pytest.approx(expected)


def test_advice_to_stop_a_device_equals_the_decision_without_it() -> None:
    decision = decided("pipeline", (10.0, 10.0, 100.0))
    problem = decision.question.problem
    without = changed_cluster(decision, devices=problem.clusters[0].devices[:2])
    for other, strategy, words in (
        (without, "pipeline", "without device-2"),
        (problem, "proportional", "strategy=proportional"),
    ):
        prediction = decide_round(other, strategy).prediction
        expected = lasting(decision.prediction) - lasting(prediction)
        assert saved(decision, words) == pytest.approx(expected)


def test_advice_on_memory_names_what_the_better_plan_needs() -> None:
    free = decided("proportional", (5.0, 20.0, 20.0))
    stages = {stage.host_id: stage for stage in free.prediction.clusters[0].stages}
    needs = stages["device-0"].memory_bytes
    first, *others = free.question.problem.clusters[0].devices
    small = changed_cluster(free, devices=(replace(first, memory_bytes=int(needs / 2)), *others))
    decision = decide(replace(free.question, problem=small))
    expected = lasting(decision.prediction) - lasting(free.prediction)
    words = f"{needs / 1e6:.0f} instead of {needs / 2e6:.0f} MB of memory for device-0"
    assert saved(decision, words) == pytest.approx(expected)


def test_advice_begins_with_the_best_and_leaves_out_what_saves_little() -> None:
    decision = decided(milliseconds=(10.0, 30.0, 10.0), mbit=20.0)
    advice = [one.saved_seconds for one in advise(decision)]
    assert advice and advice == sorted(advice, reverse=True)
    assert advice[-1] >= 0.03 * lasting(decision.prediction)


@pytest.mark.parametrize(("evaluation", "is_far"), [(0.0, True), (2.0, False)])
def test_prediction_is_compared_with_the_round_without_its_evaluation(
    evaluation: float, is_far: bool
) -> None:
    predicted = DECISION.prediction.full_round_seconds
    summary = RoundSummary(
        training_seconds=predicted, evaluation_seconds=evaluation * predicted, local_steps=5
    )
    committed = RoundCommitted(round_seconds=3 * predicted, summaries=[summary])
    assert any("far off" in line for line in explain(DECISION, committed)) == is_far


@pytest.mark.parametrize(("evaluation", "is_named"), [(0.0, False), (0.01, False), (1.5, True)])
def test_long_evaluation_names_the_setting_that_leaves_it_out(
    evaluation: float, is_named: bool
) -> None:
    summary = RoundSummary(training_seconds=10.0, evaluation_seconds=10 * evaluation)
    committed = RoundCommitted(round_seconds=10 * (1 + evaluation), summaries=[summary])
    named = [line for line in explain(DECISION, committed) if "training.evaluate_every" in line]
    assert len(named) == is_named
    assert not is_named or "saves 15 s of 25 s (60%)" in named[0]
    assert not any("training.evaluate_every" in line for line in explain(DECISION))


def test_explanation_compares_with_equal_segments() -> None:
    decision = decided("proportional", (10.0, 10.0, 40.0))
    equal = lasting(decide_round(decision.question.problem, "pipeline").prediction)
    assert any(f"equal segments would take {equal:.3g} s" in line for line in explain(decision))


def test_round_with_guessed_speeds_is_not_predicted() -> None:
    decision = replace(DECISION, guessed=("device-0",))
    summary = RoundSummary(training_seconds=2.0, local_steps=5)
    lines = explain(decision, RoundCommitted(round_seconds=3.0, summaries=[summary]))
    assert numbers(lines, 0) == [] and numbers(lines, 1)[-1] == (2, 3.0)
    assert "not predicted" in lines[1] and "device-0" in lines[1]
    assert not any("saves" in line or "bottleneck" in line for line in lines)
