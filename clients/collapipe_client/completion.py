"""What a shell completes besides commands and options. Only files are read, so that a key press is answered at once."""

import sqlite3
from contextlib import closing
from pathlib import Path

import typer

from collapipe.database import FILE_NAME
from collapipe.errors import CollapipeError
from collapipe_client.contexts import read_contexts
from collapipe_client.testbed_processes import SCHEDULER
from collapipe_client.workspace import DEFAULT_ROOT, Workspace


def job_names(context: typer.Context, incomplete: str) -> list[str]:
    """Returns the names and the ids of the jobs in the workspace of the command."""
    workspace = Workspace(context.params.get("workspace") or DEFAULT_ROOT)
    ids = _job_ids(workspace.state_dir(SCHEDULER) / FILE_NAME)
    return _fitting(ids | {job_id.rpartition("-")[0] for job_id in ids}, incomplete)


def _job_ids(path: Path) -> set[str]:
    """Returns the ids of the jobs in the database of a scheduler, or none if it cannot be read."""
    try:
        address = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=0.1)) as database:
            return {job_id for (job_id,) in database.execute("SELECT job_id FROM job")}
    except sqlite3.Error:
        return set()


def context_names(incomplete: str) -> list[str]:
    """Returns the names of the contexts of this user, or none if they cannot be read."""
    try:
        return _fitting(set(read_contexts().by_name), incomplete)
    except CollapipeError:
        return []


def _fitting(names: set[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
