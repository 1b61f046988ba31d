"""The policy's weights into servers: resharding, buckets, checks before and probes after an update."""
