"""Signals, images and volumes, drawn or in files; a rank may read only its part of each sample."""

from sparsepipe.data.volumes.datamodule import VolumeDataModule
from sparsepipe.data.volumes.generated import GeneratedVolumes
from sparsepipe.data.volumes.volume_files import VolumeFiles

__all__ = ["GeneratedVolumes", "VolumeDataModule", "VolumeFiles"]
