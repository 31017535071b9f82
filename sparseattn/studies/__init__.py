"""What is trained, one module a study; `python -m sparseattn.studies` trains.

A folder named by SPARSEATTN_STUDIES is searched as well: a module there that holds a `Study` named STUDY is one more.
"""

import importlib
import os
import pkgutil

from ..lab.study import Study

if os.environ.get("SPARSEATTN_STUDIES"):
    __path__.append(os.environ["SPARSEATTN_STUDIES"])


def names() -> list[str]:
    """Names of all studies."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def find(name: str) -> Study:
    """The study of a name."""
    return importlib.import_module(f".{name}", __package__).STUDY
