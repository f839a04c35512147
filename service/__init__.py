"""Ways in: REST, queue, worker, Python client, command line, demo."""
