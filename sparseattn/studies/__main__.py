"""The command `python -m sparseattn.studies`."""

from ..lab.command import main
from . import find, names

if __name__ == "__main__":
    raise SystemExit(main(names(), find))
