"""The files of a checkpoint: shards, manifest, and strict readers of both."""
