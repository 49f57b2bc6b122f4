"""Measurements of the running system. They are no tests, because they are slow or their results vary."""
