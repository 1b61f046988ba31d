"""Ways that buckets of weights travel: shared memory, CUDA IPC, process groups."""
