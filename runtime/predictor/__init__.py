"""Predictions: ONNX models in ONNX Runtime, batched by rows.

The protocol's encoding is in `surface/open_inference_codec.py`, sealing in `lifecycle/predictor_sealing.py`. Begin with
`served_predictor.py`, then `engine.py`.
"""
