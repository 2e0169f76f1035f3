"""Loggers of Weights & Biases, MLflow and TensorBoard, beside the metrics file."""
