"""The client of CollaPipe: the command `collapipe`, and a Python interface with the same functions."""

from collapipe_client.client import CollaPipeClient
from collapipe_client.job_files import load_job, load_preset
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.testbed_processes import Device

__all__ = ["CollaPipeClient", "Device", "LocalTestbed", "load_job", "load_preset"]
