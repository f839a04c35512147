"""The ways to use AutoMAP: command line, REST service with queue and workers, Python client, demonstration."""
