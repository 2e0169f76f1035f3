"""Sweeps: jobs that run side by side in processes of their own, and the record of each."""
