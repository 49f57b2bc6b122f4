"""Makes the links of one host what an operator says: the process beside each host of a shaped testbed."""
