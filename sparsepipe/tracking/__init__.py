"""Loggers for Weights & Biases, MLflow and TensorBoard, in addition to the metrics file."""
