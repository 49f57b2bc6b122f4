"""The search for the best decision: DSSRA."""
