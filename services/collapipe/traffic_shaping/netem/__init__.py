"""The network of a testbed, as tc and netem make it: what links are like, and how the kernel is told.

`shaping` is the world as an operator wrote it, `disciplines` turns it into commands of tc (both pure), `interface` talks to the
kernel. `collapipe.traffic_shaping.traffic_control` is another thing: the share of a link that a plan gives to a sender. Both want the root of
the same interface; whoever comes second refuses, so hosts of a shaped testbed pace (`--shaper pacing`).
"""
