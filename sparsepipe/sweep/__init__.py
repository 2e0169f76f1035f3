"""Sweeps: jobs in processes of their own beside each other, and what each has left."""
