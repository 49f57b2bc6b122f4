"""Emulation of slower processors, slower links and radios, for hosts that share one machine or one network."""
