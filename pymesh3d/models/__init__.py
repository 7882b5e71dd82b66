"""Reference models, written in plain PyTorch: they never mention ranks."""
