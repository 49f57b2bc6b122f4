"""The device agent's environment for linux/aarch64, made and run on a machine that is none."""
