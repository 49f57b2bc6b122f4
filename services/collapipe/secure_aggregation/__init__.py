"""Adds what clusters have trained without seeing any of it alone (Bonawitz et al. 2017, "Practical Secure Aggregation for
Privacy-Preserving Machine Learning").

The users of the protocol are the clusters, whose control units hold the keys. The edge server adds, and the scheduler passes keys
and shares on. docs/security.md has the steps and what they protect against. The package knows no network.
"""
