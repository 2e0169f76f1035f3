"""What layers, stages and transfers cost."""
