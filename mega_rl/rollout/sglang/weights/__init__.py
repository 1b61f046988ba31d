"""Weight updates of servers: resharding, buckets, checks before and probes after an update."""
