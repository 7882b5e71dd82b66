"""Checkpoints: a folder a step, a safetensors file a rank, and a manifest. One exists whole or not at all."""
