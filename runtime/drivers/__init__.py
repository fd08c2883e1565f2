"""The parts that all engines share: interface, base class, engine thread, event streams, and batches of rows.

The decoders' engine is in `native/`; the engines of encoders and predictors are in `encoder/` and `predictor/`. Begin
with `interface.py`, then `engine_thread.py`.
"""
