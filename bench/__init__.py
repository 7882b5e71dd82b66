"""Measurements: a file a kernel or a path, with the same name as the code it times. What was measured lies in `results/`."""
