"""What accelerators can do at best, by the name that the driver gives them."""

from __future__ import annotations

# A part of the device's name, and its dense peak (without sparsity) in FLOP/s for bf16 inputs with fp32 sums.
# The first row that fits counts, so the more special name stands first.
BF16_PEAK: tuple[tuple[str, float], ...] = (
    ("A100", 312e12),  # SC21 (Narayanan et al., arXiv 2104.04473) and Korthikanti et al. (arXiv 2205.05198)
    ("H100 PCIe", 756e12),  # torchtitan, table of peaks
    ("H100 NVL", 835e12),  # torchtitan, table of peaks
    ("H100", 989e12),  # SXM: NVIDIA/dgxc-benchmarking
    ("H200", 989e12),  # SXM: torchtitan, table of peaks
    ("GB200", 2450e12),  # NVIDIA/dgxc-benchmarking
    ("B200", 2250e12),  # NVIDIA/dgxc-benchmarking
    ("GB300", 2450e12),  # NVIDIA/dgxc-benchmarking
    ("B300", 2250e12),  # NVIDIA/dgxc-benchmarking
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak in FLOP/s of one device (as in torch.cuda.get_device_name) for matrix products in `dtype`; None where unknown."""
    if dtype != "bfloat16":
        return None
    return next((peak for name, peak in BF16_PEAK if name.lower() in device_name.lower()), None)
