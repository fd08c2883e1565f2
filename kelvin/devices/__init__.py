"""GPUs of this machine: what NVML reports, and whether replicas may stay on them.

The control plane decides which replica gets which device. Begin with `gpu_policy.py`, which is pure; only `nvml.py`
calls NVIDIA's library.
"""
