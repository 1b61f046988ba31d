"""The process of a Ray cluster of the campaign: it has Ray's package, and answers each line of its input with one."""

from __future__ import annotations

import importlib
import json
import sys

MEMORY = 100 << 20  # bytes of an object store, of which runs use none


def main() -> None:
    """Start a head and two nodes, then kill one and add another where a line says lose."""
    # In a run on Ray a node has a place for each of its ranks.
    made = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY},
    )
    nodes = [made.add_node(num_cpus=2, object_store_memory=MEMORY) for _ in range(2)]
    for line in sys.stdin:
        answer: object = made.address
        if line.strip() == "lose":
            made.remove_node(nodes.pop(1), allow_graceful=False)
            nodes.append(made.add_node(num_cpus=2, object_store_memory=MEMORY))
            answer = True
        sys.__stdout__.write(json.dumps(answer) + "\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.stdout = sys.stderr  # Ray's own lines
    main()
