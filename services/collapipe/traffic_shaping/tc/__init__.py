"""Shaping by the kernel of Linux, with the program tc (traffic control).

One interface has one root discipline, htb, which sorts packets into one class for each address of a
receiver. Packets to other addresses are not shaped. The class itself limits the rate (`ClassRate`), or a
discipline below the class shapes the packets.

Two programs shape: a service for itself (`TrafficControlShaper`), and the shaper process beside a host
(`python -m collapipe.traffic_shaping`). Each has its own handle for the root, and refuses the interface if
the other one has it.
"""
