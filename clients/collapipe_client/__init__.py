"""The client of CollaPipe: the command `collapipe`, and a Python interface with the same functions."""

from collapipe_client.client import CollaPipeClient as CollaPipeClient
from collapipe_client.job_files import load_job as load_job
from collapipe_client.job_files import load_preset as load_preset
from collapipe_client.local_testbed import LocalTestbed as LocalTestbed
from collapipe_client.testbed_processes import Device as Device
