"""Differentiable operations along the tensor-parallel axis: computation and communication joined, with their gradients."""
