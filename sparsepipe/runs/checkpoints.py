"""Reading and writing checkpoints, and refusing those that do not fit a model."""

from __future__ import annotations

import glob
import io
import os
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor, nn
from typing_extensions import override

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import CheckpointError, ConfigError
from sparsepipe.models.convert import converted, library_of, own_kernel
from sparsepipe.runs.rundir import RunDir, file_fingerprint
from sparsepipe.utils import reading
from sparsepipe.utils.files import expanded
from sparsepipe.utils.values_only import load_values, numpy_allowed

_SHOWN = 3
_FRONTS = ("", "model.", "net.", "network.", "backbone.", "layers.")
"""Prefixes that layers' names may have in the weights of other programs and of this package."""
_NOT_ALLOWED = re.compile(r"Unsupported (?:global|class): (?:GLOBAL )?(\S+)")
"""Finds the forbidden type in torch's message about a checkpoint."""


def best_checkpoint(spec: RunSpec, *, task: str) -> Path:
    """The checkpoint file that ``task`` loads; if ``spec.checkpoint`` is a run, its best one."""
    if spec.checkpoint is None:
        raise ConfigError(
            f"task={task} needs a checkpoint",
            remedy="set checkpoint= to a .ckpt file or to the directory of a training run",
        )
    return find_checkpoint(spec.checkpoint, best=True, outputs=spec.paths.outputs)


def find_checkpoint(source: str, *, best: bool = False, outputs: str = "outputs") -> Path:
    """The checkpoint file at a path: the file itself, or the last checkpoint of a run directory.

    Args:
        source: path of a file or a run directory.
        best: whether to prefer a run directory's best checkpoint to its last one. If the preferred
            one was not kept, the other is taken.
        outputs: the directory of all experiments; if no checkpoint is found, the error suggests
            a run in it with the id ``source``.
    """
    path = expanded(source)
    of_run = [RunDir(path).last, RunDir(path).best]
    for candidate in (path, *(of_run[::-1] if best else of_run)):
        if candidate.is_file():
            return candidate.absolute()
    run = RunDir(path.parent.parent if path.parent.name == "checkpoints" else path)
    files = [*path.glob("*/checkpoints/*.ckpt")]  # of an experiment, or of a run by its id
    files += expanded(outputs).glob(f"*/{glob.escape(path.name)}/checkpoints/*.ckpt")
    such = sorted(files, key=os.path.getmtime)[-1:]
    hint = f", such as {such[0].parent.parent}" if such else ""
    if run.done.exists():
        hint += (
            "; this run is finished, and trainer.checkpoints and task=clean have left these "
            f"checkpoints: {run.kept_checkpoint or 'none'}"
        )
    raise CheckpointError(
        f"no checkpoint at {path}",
        remedy=f"give a .ckpt file, or the directory of a run that has finished an epoch{hint}",
    )


def first_weights(spec: RunSpec) -> dict[str, str]:
    """Entry of ``result.json``: the fingerprint of the checkpoint that a training loads, if any."""
    named = spec.checkpoint
    return {} if named is None else {"first_weights": file_fingerprint(find_checkpoint(named))}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint's content, on the CPU, with its weights as ``state_dict``.

    Only values are read: no code in the file runs.

    Args:
        path: a checkpoint of Lightning or of another program, with its weights as ``state_dict``,
            ``model_state_dict`` or ``model``; or a file of the weights alone.
    """
    remedy = "if it is incomplete, remove it and train again, with force=true"
    with reading.explained(path, "checkpoint", error=CheckpointError, remedy=remedy):
        reading.check_regular(path)
    try:
        value = load_values(path)
    except Exception as error:
        if named := _NOT_ALLOWED.search(str(error)):
            raise CheckpointError(
                f"{path} contains the type {named[1]}, which is not read: it could run code",
                remedy="if you trust the file, call "
                f"torch.serialization.add_safe_globals([{named[1]}]) in a module that the run "
                "imports; or keep such values out of checkpoints",
            ) from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: {reason}",
            remedy=remedy,
        ) from error
    whole = value if isinstance(value, Mapping) else {}
    below = [whole[key] for key in _WEIGHTS if isinstance(whole.get(key), Mapping)]
    weights = below[0] if below else whole
    are_values = all(isinstance(v, Tensor) and not v.is_meta for v in weights.values())
    if not ((below or whole) and are_values):
        raise CheckpointError(
            f"{path} has no 'state_dict' in which all values are tensors with data",
            remedy="give a checkpoint written by Lightning or with "
            "torch.save(model.state_dict(), path)",
        )
    return {**(whole if below else {}), "state_dict": weights}


_WEIGHTS = ("state_dict", "model_state_dict", "model")
"""Keys of the weights in checkpoints of Lightning and of other programs."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Which tensors of a file were loaded into which tensors of a model.

    Args:
        rows: a tuple for each tensor of either: its name in the model and its name in the file
            (empty if it is not there), and whether it was loaded, skipped (and why) or missing.
        notes: remarks on other names or layouts that were recognised in the file.
    """

    rows: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether file and model have the same tensors, and all were loaded."""
        return all(state == LOADED for _, _, state in self.rows)

    def table(self) -> list[dict[str, str]]:
        """The rows as mappings with the keys ``model``, ``file`` and ``state``."""
        return [{"model": own, "file": there, "state": state} for own, there, state in self.rows]

    def __str__(self) -> str:
        counts = Counter(state.partition(":")[0] for *_, state in self.rows)
        listed = ", ".join(f"{counts[state]} {state}" for state in (LOADED, SKIPPED, MISSING))
        return "; ".join([listed, *self.notes])


LOADED, SKIPPED, MISSING = "loaded", "skipped", "missing"


def load_weights(
    module: nn.Module, weights: Mapping[str, Tensor], source: Path, *, strict: bool = True
) -> LoadedWeights:
    """Loads a file's weights into a module; its names may have other prefixes than the module's.

    From the file's names, a leading ``module.`` and any ``_orig_mod.`` and ``_forward_module.``
    are removed, which DDP, torch.compile and Fabric add. If the model lacks such a name, one of the
    prefixes :data:`_FRONTS` is replaced by the model's own. A tensor fits if its name and shape are
    the model's, except for dimensions of size 1. A 5-D ``weight`` where the model has a ``kernel``
    counts as spconv's: [C_out, K, K, K, C_in] or, in version 1, [K, K, K, C_in, C_out], with
    indices as (batch, z, y, x). Where names do not cover the model, layers of another library are
    paired in their order (:func:`~sparsepipe.models.convert.converted`), unless the file is of a
    run of SparsePipe.

    Args:
        module: the module that gets the weights; unchanged if an error is raised.
        weights: the file's tensors by name.
        source: path of the file, for errors.
        strict: whether all tensors of file and module must fit; else at least one must.
    """
    own = module.state_dict()
    if adapt := getattr(module, "adapt_weights", None):
        weights = adapt(weights)
    names = _names_in(own, weights)
    fitting, rows, notes = {}, [], []
    is_foreign = not RunDir(source.parent.parent).config.is_file()
    if len(names) < len(own) and is_foreign and (library := library_of(weights)):
        with suppress(ConfigError):  # then it is of another model, as the error below says
            even = [key for key, each in weights.items() if each.ndim == 3 and len(each) % 2 == 0]
            weights = converted(weights, module, library=library)
            if library == "torchsparse" and even:
                raise CheckpointError(
                    f"the order of the offsets of {even[0]} in {source} is not known: z is fastest "
                    "if torchsparse made them, otherwise x",
                    remedy="load the file yourself, and give one with what "
                    "sparsepipe.models.converted(weights, network, library=...) returns",
                )
            names, notes = {name: name for name in weights}, [f"layers in the order of {library}"]
    for name, value in own.items():
        theirs = names.get(name)
        found = None if theirs is None else _fitted(name, weights[theirs], value)
        if theirs is None:
            rows.append((name, "", MISSING))
        elif found is None:
            shape = f"{tuple(weights[theirs].shape)} in the file, {tuple(value.shape)} in the model"
            rows.append((name, theirs, f"{SKIPPED}: {shape}"))
        else:
            fitting[name] = found
            rows.append((name, theirs, LOADED))
            if name != theirs:
                notes.append(f"other names, such as '{theirs}' for '{name}'")
            if name.endswith("kernel") and theirs.endswith("weight"):
                notes.insert(0, "weights of spconv's layout")
    used = set(names.values())
    rows += [("", name, f"{SKIPPED}: not in the model") for name in weights if name not in used]
    loaded = LoadedWeights(tuple(rows), tuple(notes[:2]))
    if not (loaded.complete if strict else fitting):
        raise _of_another_model(loaded, source, strict=strict)
    module.load_state_dict({**own, **fitting})
    return loaded


def _names_in(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps names in the model to names in the file, for all tensors that both have."""
    firsts = {name.partition(".")[0] for name in own}
    front = f"{firsts.pop()}." if len(firsts) == 1 else ""
    found: dict[str, str] = {}
    for name in weights:
        plain = name.replace("_orig_mod.", "").replace("_forward_module.", "")
        while plain.startswith("module.") and plain not in own:
            plain = plain.removeprefix("module.")
        ways = [front + plain.removeprefix(each) for each in _FRONTS if plain.startswith(each)]
        for way in (plain, *ways):
            kernel = re.sub(r"\bweight$", "kernel", way)
            if way in own or kernel in own:
                found.setdefault(way if way in own else kernel, name)
                break
    return found


def _fitted(name: str, value: Tensor, own: Tensor) -> Tensor | None:
    """The file's tensor ``value`` in the shape of the model's ``own``; None: it does not fit."""
    shape = own.shape
    if (value.is_complex(), value.layout) != (own.is_complex(), own.layout):
        return None
    if value.shape == shape:
        return value
    if name.endswith("kernel") and value.ndim == 5:  # spconv's; ours is [K^3, C_in, C_out]
        if value.shape[0] == shape[2] and value.shape[4] == shape[1]:
            value = own_kernel(value, "spconv", value.shape[1:4], axes="zyx")
        else:  # perhaps of version 1
            value = value.flatten(0, 2)
        return value if value.shape == shape else None
    without_ones = [[size for size in each if size != 1] for each in (value.shape, shape)]
    return value.reshape(shape) if without_ones[0] == without_ones[1] else None


def _of_another_model(loaded: LoadedWeights, source: Path, *, strict: bool) -> CheckpointError:
    differences = [
        f"{name} is missing in it"
        if state == MISSING
        else f"{name} is {state.removeprefix(f'{SKIPPED}: ')}"
        if name
        else f"it has {there}, which the model lacks"
        for name, there, state in loaded.rows
        if state != LOADED
    ]
    shown = "; ".join(differences[:_SHOWN])
    more = len(differences) - _SHOWN
    config = RunDir(source.parent.parent).config
    hint = f", as in {config}" if config.is_file() else ""
    return CheckpointError(
        f"{source} is of another model: {shown}" + (f"; and {more} more" if more > 0 else ""),
        remedy=f"choose the model, its width and the data of its training{hint}"
        + ("; to begin with only what fits, set checkpoint_strict=false" if strict else ""),
    )


class DirectCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to the given path and nowhere else.

    Lightning's own class writes to the system's temporary directory first, whose disk may be
    smaller or fuller than the run's.
    """

    @override
    def load_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Reads a checkpoint, which may contain numpy's numbers and arrays."""
        with numpy_allowed():
            return super().load_checkpoint(*args, **options)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        # Saved to memory first: if torch wrote the file, its own error would hide the disk's.
        content = io.BytesIO()
        torch.save(checkpoint, content)
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with place.open("wb") as stream:
                stream.write(content.getbuffer())
        except OSError:
            with suppress(OSError):
                place.unlink(missing_ok=True)
            raise
