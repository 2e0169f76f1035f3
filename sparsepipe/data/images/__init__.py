"""Images: drawn digits, real digits, and images in a user's folders."""

from sparsepipe.data.images.datamodule import ImageDataModule, ImageFolder
from sparsepipe.data.images.drawn_digits import DrawnDigits
from sparsepipe.data.images.real_digits import Mnist, PackagedDigits, Svhn, Usps
from sparsepipe.data.images.shifts import ImageShift

__all__ = [
    "DrawnDigits",
    "ImageDataModule",
    "ImageFolder",
    "ImageShift",
    "Mnist",
    "PackagedDigits",
    "Svhn",
    "Usps",
]
