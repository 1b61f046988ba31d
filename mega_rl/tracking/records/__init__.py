"""Records of steps: folders of safetensors and JSON lines, which readers open without torch.

    records/step_000011/
        record.json              what was recorded, of which run, with a checksum of every other file
        replica_00000.safetensors  the rows of one data-parallel replica
        replica_00000.jsonl        the same rows for people: texts, rewards, the text of every token
        weights/actor/ ...         the weights that the step began with, where metrics.records.weights is set

docs/replay.md describes every tensor.
"""
