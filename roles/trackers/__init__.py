"""The run's metrics for other tools: TensorBoard, Weights & Biases (offline)."""
