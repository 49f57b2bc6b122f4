"""What a shell completes besides commands and options. Only files are read, so that a key press is answered at once."""

import typer

from collapipe.errors import CollapipeError
from collapipe_client.contexts import read_contexts
from collapipe_client.testbed_processes import SCHEDULER
from collapipe_client.workspace import DEFAULT_ROOT, Workspace


def job_names(context: typer.Context, incomplete: str) -> list[str]:
    """Returns the names and the ids of the jobs in the workspace of the command."""
    workspace = Workspace(context.params.get("workspace") or DEFAULT_ROOT)
    ids = {folder.name for folder in (workspace.state_dir(SCHEDULER) / "jobs").glob("*-*")}
    return _fitting(ids | {job_id.rpartition("-")[0] for job_id in ids}, incomplete)


def context_names(incomplete: str) -> list[str]:
    """Returns the names of the contexts of this user, or none if they cannot be read."""
    try:
        return _fitting(set(read_contexts().by_name), incomplete)
    except CollapipeError:
        return []


def _fitting(names: set[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
