"""A plan really run on this host: a process for every machine, real bytes over sockets, limited rates.

`machine.py` is such a process, `network.py` says where it lives: beside the others, with token buckets of its own, or
in a network namespace whose interface the kernel limits. `controller.py` runs the tasks and the online schedule: it
computes by waiting, decides which flow gets which rate whenever something ends, and tells the senders. It shares no
code with the simulator.
"""
