"""Processes are killed, frozen and flooded while they train."""
