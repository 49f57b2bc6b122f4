"""The client of CollaPipe: the command `collapipe`, and a Python interface with the same functions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collapipe_client.client import CollaPipeClient as CollaPipeClient
    from collapipe_client.job_files import load_job as load_job
    from collapipe_client.job_files import load_preset as load_preset
    from collapipe_client.local_testbed import LocalTestbed as LocalTestbed
    from collapipe_client.testbed_processes import Device as Device

_MODULES = {
    "CollaPipeClient": "client",
    "load_job": "job_files",
    "load_preset": "job_files",
    "LocalTestbed": "local_testbed",
    "Device": "testbed_processes",
}


def __getattr__(name: str) -> Any:
    """Imports what is used. So the command can begin before its imports, which take a second."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
