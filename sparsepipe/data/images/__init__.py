"""Images of digits: drawn here, or the user's copy of MNIST."""

from sparsepipe.data.images.datamodule import ImageDataModule
from sparsepipe.data.images.shifts import ImageShift
from sparsepipe.data.images.sources import DrawnDigits, Mnist

__all__ = ["DrawnDigits", "ImageDataModule", "ImageShift", "Mnist"]
