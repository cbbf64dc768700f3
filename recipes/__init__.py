"""Scripts that train with `hf_dpopt`. A package of the extra `recipes` that is missing ends them with one line."""

import importlib.util
import sys

import hf_dpopt  # noqa: F401  quiets what libraries say while they are imported

for _name in ("datasets", "rouge_score", "sacrebleu", "sklearn"):
    if importlib.util.find_spec(_name) is None:
        sys.stderr.write(f"error: recipes/ need the package {_name}. Run: pip install 'hf-dpopt[recipes]'\n")
        sys.exit(2)
