"""Tests of faults: processes are killed, frozen or flooded with messages during training."""
