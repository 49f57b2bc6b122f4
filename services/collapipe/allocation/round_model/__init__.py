"""The model of a round: what is decided about, and what a decision leads to.

Read `problem` first, then `prediction`.
"""
