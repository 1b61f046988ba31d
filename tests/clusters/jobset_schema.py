"""Check of manifests on standard input against the schema of JobSet and its Job; its folder is the first argument.

Reading a manifest into the models checks types and required fields, and a field that they do not know is lost on the
way back. Prints a line for each difference.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import yaml


def differences(given: object, read: object, place: str = "") -> Iterator[str]:
    """Where what was given is not what was read."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key in sorted({*given, *read}):
            yield from differences(given.get(key), read.get(key), f"{place}/{key}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for i, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from differences(one, other, f"{place}/{i}")
    elif given != read:
        yield f"{place}: {given!r} is read as {read!r}"


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    models = importlib.import_module("kubeflow_trainer_api.models")
    for manifest in yaml.safe_load_all(sys.stdin):
        if manifest["kind"] == "JobSet":
            read = models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
            print("\n".join(differences(manifest, read)))
