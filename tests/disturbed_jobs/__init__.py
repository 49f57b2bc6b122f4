"""Imitates whole jobs whose hosts die, restart, lie and get lost, in simulated time, with the real decisions about them."""
