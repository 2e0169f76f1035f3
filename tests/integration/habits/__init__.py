"""What people write in a LightningModule, and what a pipeline makes of it."""
