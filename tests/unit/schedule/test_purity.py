"""The room computes with nothing but Python itself."""

import ast
import sys
from pathlib import Path

import sparsepipe.schedule


def test_only_the_standard_library_is_imported():
    found = set()
    for path in Path(sparsepipe.schedule.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [alias.name for alias in node.names]
                is_room = node.module == "sparsepipe.utils"
                found |= {f"{node.module}.{name}" for name in names} if is_room else {node.module}
    own = {name for name in found if name.startswith("sparsepipe.schedule.")}
    beyond = {name for name in found - own if name.split(".")[0] not in sys.stdlib_module_names}
    # Two modules of utils, which begin with the standard library and errors alone: extensions
    # imports what a dotted path names, reading reads a plan's file.
    utils = {"sparsepipe.utils.extensions", "sparsepipe.utils.reading"}
    assert beyond == {"sparsepipe.errors", *utils}
