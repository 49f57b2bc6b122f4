"""Takes over what older versions of CollaPipe stored: a JSON document for each job, round and result."""

import itertools
import json
import logging
import shlex
from pathlib import Path

from collapipe.database import Database
from collapipe.documents import read_document
from collapipe.errors import CorruptDataError

logger = logging.getLogger(__name__)

_REMEDY = (
    "restore it or delete it. Hosts that were away during earlier deletions then keep their files of those jobs, in the folder jobs of "
    "their --state-dir, until somebody deletes them there"
)
_ENDED = {f"JOB_STATE_{state}" for state in ("SUCCEEDED", "FAILED", "CANCELLED")}
_NAMES = ("jobs", "deleted", "deleted.json", "grants.json")


def take_over_documents(database: Database, directory: Path) -> None:
    """Stores the documents of an older version in the database of the scheduler, except for jobs that it knows or has deleted. Then
    moves the files to a folder of their own, which a person may delete.

    If it is cut short at any moment, the next call ends it. Documents of jobs that are damaged are taken as they are, and refused
    when they are read.

    Raises:
        CorruptDataError: The deletions or the numbers of grants are damaged.
        OSError: A file cannot be read, or the disk is full.
    """
    found = [directory / name for name in _NAMES if (directory / name).exists()]
    if not found:
        return
    with database.transaction():
        _take_over_deletions(database, directory)
        _take_over_grants(database, directory / "grants.json")
    rows = database.execute("SELECT job_id FROM job UNION SELECT job_id FROM deletion")
    known = {job_id for (job_id,) in rows}
    for path in sorted((directory / "jobs").glob("*/job.json")):
        if path.parent.name in known:
            logger.warning("job %s stays as %s has it", path.parent.name, database.path)
        else:
            # With one transaction for all jobs, the log of the database would become as large as all of them.
            with database.transaction():
                _take_over_job(database, path.parent)
    names = itertools.chain(["migrated"], (f"migrated-{number}" for number in itertools.count(2)))
    folder = next(directory / name for name in names if not (directory / name).exists())
    folder.mkdir()
    for path in found:
        path.rename(folder / path.name)
    logger.info(
        "the jobs of an older version are in %s now, and their files in %s", database.path, folder
    )


def _take_over_job(database: Database, folder: Path) -> None:
    job_id = folder.name
    database.execute("INSERT INTO job VALUES (?, ?)", job_id, _job_text(folder / "job.json"))
    for table in ("round", "result"):
        for file in (folder / f"{table}s").glob(f"{'[0-9]' * 6}.json"):
            values = job_id, int(file.stem), _text(file)
            database.execute(f"INSERT INTO {table} VALUES (?, ?, ?)", *values)
    for table in ("planner", "events"):
        file = folder / f"{table}.json"
        if file.exists():
            database.execute(f"INSERT INTO {table} VALUES (?, ?)", job_id, _text(file))


def _take_over_grants(database: Database, path: Path) -> None:
    remedy = (
        "without it, old grants could count again. Restore it; or make sure that the clock of this machine is right (`date`), and run "
        f"`printf '{{\"reserved\": %s000000}}' $(($(date +%s) + 86400)) > {shlex.quote(str(path))}`: the numbers then go on a day later "
        "than now"
    )
    document = read_document(path, remedy, {"reserved": int})
    if document is None:
        return
    if not 0 <= document["reserved"] < 1 << 62:
        raise CorruptDataError(f"{path} is damaged (reserved is {document['reserved']}): {remedy}")
    database.execute("UPDATE grant_number SET reserved = max(reserved, ?)", document["reserved"])


def _take_over_deletions(database: Database, directory: Path) -> None:
    path = directory / "deleted.json"
    document = read_document(path, _REMEDY, {"num_deletions": int, "job_ids": list})
    if document is not None:
        job_ids, total = document["job_ids"], document["num_deletions"]
        are_ids = all(isinstance(job_id, str) and job_id.isprintable() for job_id in job_ids)
        if not are_ids or not len(job_ids) <= total < 1 << 62:
            raise CorruptDataError(f"{path} is damaged: {_REMEDY}")
        for number, job_id in enumerate(job_ids, start=total - len(job_ids) + 1):
            database.execute("INSERT OR IGNORE INTO deletion VALUES (?, ?)", number, job_id)
    for left in (directory / "deleted").glob("*"):  # Their deletion was cut short.
        database.execute("INSERT OR IGNORE INTO deletion (job_id) VALUES (?)", left.name)


def _job_text(path: Path) -> str:
    """Returns the document of a job. One that has ended gets the time of its file, if it has none of its own."""
    text = _text(path)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(document, dict) or document.get("ended_at"):
        return text
    if str(document.get("state")) not in _ENDED:
        return text
    return json.dumps({**document, "ended_at": path.stat().st_mtime})


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
