"""The queue of jobs, its store and its workers."""
