"""The process that computes: zygote, standby, runtime, and the engine within."""
