"""GPUs of this machine: what NVML says of them, and whether work may be left on them.

Which replica gets which device is the control plane's policy. Begin with `gpu_policy.py`, which is pure; `nvml.py`
alone asks NVIDIA's library.
"""
