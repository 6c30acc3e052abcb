"""The file in a saved model that leads transformers to the classes of this project.

`transformers serve FOLDER` and `pipeline(model=FOLDER)` import nothing of ours. With `trust_remote_code`, transformers
imports the file of the folder that config.json names as `auto_map`. Ours holds no model code: it imports the installed
package, which registers every class.
"""

import json
import os
from pathlib import Path

from common.atomic_files import write_atomic

FILE = "modeling_palimpsest.py"
# `transformers serve` looks up this name in the module transformers, which has no class of ours. AutoModelForCausalLM
# finds the class by the configuration.
ARCHITECTURES = ["AutoModelForCausalLM"]

TEMPLATE = '''"""Finds the classes of this folder's model in the package palimpsest-lm, which must be installed.

transformers imports this file if it is called with trust_remote_code.
"""

try:
    from {config_module} import {config}
    from {model_module} import {model}
except ImportError as error:
    raise ImportError(
        "this model needs the package palimpsest-lm: install it, or put the folder of its checkout on PYTHONPATH"
    ) from error

__all__ = ["{config}", "{model}"]
'''


def write_loader_file(folder: str | os.PathLike, config: type, model: type) -> None:
    """Write the file to a saved model, and name it in its config.json.

    Args:
        folder: holds config.json.
        config, model: the classes of its configuration and of the model, or classes derived from them.
    """
    config, model = importable(config), importable(model)
    text = TEMPLATE.format(
        config=config.__name__, config_module=config.__module__, model=model.__name__, model_module=model.__module__
    )
    write_atomic(Path(folder) / FILE, text)
    path, module = Path(folder) / "config.json", Path(FILE).stem
    auto_map = {
        "AutoConfig": f"{module}.{config.__name__}",
        "AutoModelForCausalLM": f"{module}.{model.__name__}",
    }
    values = json.loads(path.read_text(encoding="utf-8"))
    values |= {"architectures": ARCHITECTURES, "auto_map": auto_map}
    write_atomic(path, json.dumps(dict(sorted(values.items())), indent=2) + "\n")


def importable(derived: type) -> type:
    """Return the nearest base of this project: FSDP and notebooks derive classes that no file can import."""
    return next(base for base in derived.__mro__ if base.__module__.startswith(f"{__package__}."))
