"""Scripts that train with `hf_dpopt`. A package of the extra `recipes` that is missing ends them with one line."""

import importlib.util
import sys

from hf_dpopt.common.extras import missing

for _name in ("datasets", "evaluate"):
    if importlib.util.find_spec(_name) is None:
        sys.stderr.write(f"error: {missing(_name, 'recipes/', 'it is not installed')}\n")
        sys.exit(2)
