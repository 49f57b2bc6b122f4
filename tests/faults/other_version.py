"""Runs a service that speaks another version of the protocol: `VERSION=2 python other_version.py MODULE ARGUMENTS`."""

import os
import runpy
import sys

from collapipe.protocol import OURS

if __name__ == "__main__":
    # The import of any other module of CollaPipe must come later, because it may read the versions.
    OURS.oldest = OURS.newest = int(os.environ["VERSION"])
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
