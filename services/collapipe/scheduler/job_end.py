"""Says why a job does not try again, in words."""

from collapipe.job_life.tries import GivesUp, Tries


def say_end(why: GivesUp, tries: Tries) -> str:
    """Says why a job does not try again; empty if its last error says so itself."""
    attempts = f"{tries.num_failures} attempt{'s' * (tries.num_failures != 1)}"
    match why:
        case GivesUp.FAULTY_TOO_OFTEN:
            return "the job is given up, because the same host has ended several attempts by wrong answers or without progress"
        case GivesUp.NOT_FINITE_AGAIN:
            return "the job is given up, because such values came back in another attempt"
        case GivesUp.TOO_MANY_REPEATS:
            return (
                f"the job is given up: it has repeated committed rounds {tries.num_repeats - 1} times without getting further, which is the "
                "limit. Repair the cause, then resume the job with `collapipe train --resume`"
            )
        case GivesUp.TIME_IS_OVER if tries.limit_seconds:
            return (
                f"the job is given up after {attempts} without a commit: after such failures, it tries again for at most "
                f"{tries.seconds_of_tries:.0f} s. Repair the cause, then resume the job with `collapipe train --resume`"
            )
    return ""
