"""Real runs of a plan on this host: a process for every machine, real bytes over sockets, limited rates.

`machine.py` is such a process. `network.py` starts these processes: either with token buckets of their own, or in
network namespaces whose interfaces the kernel limits. `controller.py` runs the tasks and the online schedule: it waits
for the compute time of each task, computes the rate of each flow whenever something ends, and sends the rates to the
senders. It shares no code with the simulator.
"""
