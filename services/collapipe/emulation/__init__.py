"""Emulation of slower processors, slower links and radios."""
