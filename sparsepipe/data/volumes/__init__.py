"""Signals, images and volumes of which a rank may read its part only: drawn here, or your files."""

from sparsepipe.data.volumes.datamodule import VolumeDataModule
from sparsepipe.data.volumes.generated import GeneratedVolumes
from sparsepipe.data.volumes.volume_files import VolumeFiles

__all__ = ["GeneratedVolumes", "VolumeDataModule", "VolumeFiles"]
