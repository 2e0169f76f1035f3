"""Images of digits: drawn here, or MNIST where a user has it."""

from sparsepipe.data.images.datamodule import ImageDataModule
from sparsepipe.data.images.drawn import DrawnDigits
from sparsepipe.data.images.mnist import Mnist

__all__ = ["DrawnDigits", "ImageDataModule", "Mnist"]
