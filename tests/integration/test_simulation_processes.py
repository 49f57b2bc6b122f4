"""A simulation whose work is shared by processes."""

from unit.simulation.scenarios import scenario

from collapipe.simulation.rounds import run_scenario


def test_processes_that_share_the_work_get_the_same_results() -> None:
    config = scenario(seeds=2, rounds=2)
    delays = [
        [[record.delay_seconds for record in run.rounds] for run in run_scenario(config, jobs=jobs)]
        for jobs in (1, 2)
    ]
    assert delays[0] == delays[1]
