"""Installs and runs the device agent for linux/aarch64 on a machine of another architecture, by emulation."""
