"""Predictions: ONNX models through ONNX Runtime, batched by rows, behind the engine's own thread."""
