"""Compiles the kernels of the triton backend for GPUs that are not there, and says how it went.

    python -m tests.support.triton_compiled 80 90

The launches of every kernel are those of the backend itself, on tensors of a CPU; they are noted
instead of run. A line for each compiled kernel has its name, its sizes, the bytes of shared memory,
those of registers in local memory, and the numbers of asynchronous copies and matrix instructions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from sparsepipe.sparse import SparseTensor
from sparsepipe.sparse.backends.triton import configurations, levels
from sparsepipe.sparse.backends.triton.convolution import Convolution
from sparsepipe.sparse.backends.triton.pooling import AveragePool, GlobalPool, MaxPool
from sparsepipe.sparse.kernel_spec import KernelSpec

launches: list[tuple[JITFunction, dict[str, Any], dict[str, int]]] = []
POINTERS = {
    **{torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"},
    **{torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64"},
}


def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages") if key in kwargs}
    given = dict(zip(self.arg_names, args, strict=False)) | kwargs
    launches.append((self, given, options))
    if self.__name__ == "_list_sites":
        given["number_ptr"].fill_(4)


def launch_all(channels: list[tuple[int, int]], dtypes: list[torch.dtype]) -> None:
    sites = [[b, x, y, z] for b in range(2) for x in range(8) for y in range(8) for z in range(9)]
    coords = torch.tensor(sites, dtype=torch.int32)
    for dtype in dtypes:
        for number, (before, after) in enumerate(channels):
            windows = [KernelSpec.of(3)]
            if not number:
                windows += [KernelSpec.of(2, stride=2), KernelSpec.of(3, stride=2)]
            for spec in windows:
                feats = torch.ones(len(coords), before, dtype=dtype, requires_grad=True)
                kernel = torch.ones(spec.volume, before, after, dtype=dtype, requires_grad=True)
                x = SparseTensor(feats, coords, spatial_shape=(8, 8, 9), batch_size=2)
                own = levels.kernel_map(x.cache, spec) if not number else x.cache.kernel_map(spec)
                Convolution.apply(feats, kernel, None, own).sum().backward()
                if not number and spec.size == spec.stride:
                    for pool in (MaxPool, AveragePool):
                        pool.apply(feats, own).sum().backward()
        for takes_largest in (True, False):
            GlobalPool.apply(feats, coords, 2, takes_largest).sum().backward()


def source(fn: JITFunction, given: dict[str, Any]) -> ASTSource:
    signature, constants, attributes = {}, {}, {}
    for place, (name, parameter) in enumerate(zip(fn.arg_names, fn.params, strict=True)):
        value = given[name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[name] = POINTERS[value.dtype] if is_tensor else "i32"
        if is_tensor or value % 16 == 0:
            attributes[place,] = [["tt.divisibility", 16]]
    return ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attributes)


def main() -> None:
    torch.set_float32_matmul_precision("high")
    JITFunction.run = note  # type: ignore[method-assign]
    channels = [(64, 64), (16, 16), (64, 128), (256, 256), (512, 512), (1, 64), (4, 32), (24, 40)]
    launch_all(channels, [torch.float16, torch.float32])
    configurations._FEW_PROGRAMS = 1  # as on levels of many sites
    launch_all([(128, 128), (256, 512)], [torch.float16, torch.float32])
    seen = set()
    for fn, given, options in launches:
        made = source(fn, given)
        for architecture in map(int, sys.argv[1:]):
            key = (architecture, made.hash(), *options.items())
            if key in seen:
                continue
            seen.add(key)
            target = GPUTarget("cuda", architecture, 32)
            kernel = triton.compile(made, target=target, options=options)
            ptx = kernel.asm["ptx"]
            with tempfile.TemporaryDirectory() as directory:
                text, binary = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
                text.write_text(ptx)
                binary.write_bytes(kernel.asm["cubin"])
                tool = Path(get_ptxas(architecture).path).with_name("cuobjdump")
                usage = subprocess.run(
                    [tool, "--dump-resource-usage", binary],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            sizes = {n: v for n, v in given.items() if n.isupper() and type(v) in (int, bool, str)}
            print(json.dumps({
                "kernel": fn.__name__, "architecture": architecture, "sizes": sizes, **options,
                "dtype": str(next(v for v in given.values() if torch.is_tensor(v)).dtype),
                "shared_bytes": kernel.metadata.shared,
                "local_bytes": sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
                "copies": len(re.findall(r"cp\.async\.c[ag]", ptx)),
                "products": len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", ptx)),
            }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
