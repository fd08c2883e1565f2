"""What every engine shares: its interface, its thread, the stream of its events, batches of rows.

The decoder's engine is `native/`; those of encoders and predictors are in `encoder/` and `predictor/`. Begin with
`interface.py`, then `engine_thread.py`.
"""
