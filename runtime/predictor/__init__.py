"""Predictions: ONNX models through ONNX Runtime, batched by rows.

The protocol's forms are `surface/open_inference_codec.py`'s, sealing is `lifecycle/predictor_sealing.py`'s. Begin
with `serving.py`, then `engine.py`.
"""
