"""SparsePipe: sparse 3D convolutional networks, trained in parallel."""

__version__ = "0.1.0"
